"""Tests of released client libraries and benchmarks against a running service: `make test-clients`.

Not part of `make test`: the clients are several gigabytes, each in its own environment, which the Makefile creates.
"""
