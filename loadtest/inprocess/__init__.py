"""Benchmarks of the engine in this process."""
