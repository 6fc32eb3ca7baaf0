"""A load client for OpenAI-compatible servers: `workload` makes requests, `client` sends them and records what came when."""
