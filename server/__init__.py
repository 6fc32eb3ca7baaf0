"""The OpenAI-compatible server: FastAPI in front, an engine in a thread of its own behind. See `octavo.server.app`."""
