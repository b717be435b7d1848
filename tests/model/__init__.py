"""Tests of `model`: each fast path against a reference implementation."""
