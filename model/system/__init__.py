"""Machine: limits of CPUs and memory, calls to the C library, and memory pages of tensors."""
