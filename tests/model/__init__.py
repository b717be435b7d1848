"""Tests of `model`: every fast path against its slow twin."""
