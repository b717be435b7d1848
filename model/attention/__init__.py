"""Attention: backends, KV-cache, position biases and GPU kernels."""
