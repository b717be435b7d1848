"""Native CPU kernels in C++ with a plain C interface, compiled once for each machine and loaded by ctypes.

Each CPU level (instruction set) has one library, compiled with the level's flags. Sums must have one order for any
number of threads and rows, so that results are batch-invariant. ctypes releases the GIL while a kernel runs.
"""
