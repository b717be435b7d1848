"""Tests of `model.training`."""
