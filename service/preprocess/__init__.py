"""Preprocessing: from a validated request to sequences of token ids."""
