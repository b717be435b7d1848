"""`kvasir bench`."""

from loadtest.bench_engine import main

__all__ = ["main"]
