"""Kernels of our own, in C++ with a plain C interface: built once in seconds, loaded by ctypes, on CPUs.

levels     which instructions a machine has: the levels that every kernel is compiled for
build      from the *.cpp files here to one library a level; `python -m model.kernels.build`
loading    that library in this process: loaded at once where it is built, else built in a thread; KERNELS
structures what kernels are handed over, field by field as in C

attention.cpp, attention_tile.h   attention over the paged cache: a tile of keys against rows of queries
attention_few.h, _stream.h        the same against few rows, as in a step of decodes, and what it reads next
attention_tasks.h, _parts.h       the tasks it is cut into
linear.h, linear.cpp              rows times a packed matrix: float32, bfloat16, eight bits
layers.cpp, rows.h                all else of a layer: norms, rotations, activations, residuals

A kernel is a function in a *.cpp file here. All of them are compiled together, once for each level, with one level's
flags a library, so that a file may say `#if defined(__AVX512BF16__)` and no code of one level can end up in another.

    #include "kernel.h"
    KVASIR_KERNEL void kvasir_scale(float* x, int64_t count, float factor, int64_t threads) {
        parallel_for(count, threads, [&](int64_t index, int thread) { x[index] *= factor; });
    }

    library = KERNELS.loaded  # None: not built (yet), or no compiler: go PyTorch's way, which must answer the same
    if library is not None:
        scale = library.function("kvasir_scale", c_void_p, c_int64, c_float, c_int64)
        scale(x.data_ptr(), x.numel(), 2.0, torch.get_num_threads())

`function` is a look in a dictionary after the first time. ctypes lets go of the interpreter's lock while a kernel runs.
`kernel.h` has `parallel_for`, which runs on threads of our own (threads.cpp says why they are not OpenMP's);
`lanes.h` has 16 floats as one value on every level, and `halves.h` makes them of float16. Look at `KERNELS.loaded` once
a step, not once a layer. Sums must have one order, whatever the number
of threads and of rows: the same bits alone and in any batch.
"""
