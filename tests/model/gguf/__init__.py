"""Tests of model/gguf."""
