"""Malformed input, hostile clients and deficient machines."""
