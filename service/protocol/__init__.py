"""OpenAI wire contract: requests, responses and errors."""
