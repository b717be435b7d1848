"""Generators of the pages and pictures in docs/ from docs/results."""
