"""Benchmarks that run the engine in their own process, without a service."""
