"""Prometheus metrics: definitions and recording."""
