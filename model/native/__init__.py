"""Transformer computed by the native CPU kernels."""
