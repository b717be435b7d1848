"""Structured output in the API process: read the requested format, and check that it can be enforced."""
