"""Execution of an engine step: input tensors, forward pass, sampling and CUDA graphs."""
