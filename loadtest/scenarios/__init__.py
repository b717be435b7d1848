"""Benchmarks of a running service, over HTTP."""
