"""GPU kernels and quantization."""
