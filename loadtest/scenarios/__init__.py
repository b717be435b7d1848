"""Benchmarks that start a service and measure it over HTTP."""
