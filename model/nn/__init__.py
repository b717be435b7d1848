"""Transformer and its layers in PyTorch."""
