"""Gemma 1 to 4."""
