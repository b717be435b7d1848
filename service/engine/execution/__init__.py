"""Execution of a step: inputs, forward pass, sampling, CUDA graphs."""
