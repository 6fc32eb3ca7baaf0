"""The routes under /v1 and what they are made of: requests and answers in OpenAI's form."""
