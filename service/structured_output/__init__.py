"""Structured output in the API process: turn a requested output format into a grammar, or reject the request."""
