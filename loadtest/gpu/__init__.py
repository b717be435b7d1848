"""Benchmarks of a GPU."""
