"""Structured output in the API process: check that a requested output format can be enforced."""
