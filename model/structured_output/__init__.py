"""Grammar-constrained decoding with llguidance."""
