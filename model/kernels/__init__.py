"""Native CPU kernels in C++ with a plain C interface: compiled once, in seconds, and loaded by ctypes.

A kernel is an exported function in a *.cpp file here. Each level is a library of its own, compiled with that level's
flags. A file may therefore test macros such as `#if defined(__AVX512BF16__)`, and code of two levels never mixes.

Rules for kernels and their callers:

- Sums must have one order for any number of threads and rows, so that results are batch-invariant.
- `KernelLibrary.function` is a dictionary lookup after its first call.
- ctypes releases the GIL while a kernel runs.
"""
