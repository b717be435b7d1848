// The threads that kernels run on, and a look at how fast they read memory.
#include "kernel.h"

namespace kvasir {
Parallel parallel = nullptr;
}

// Who runs a parallel region: GOMP_parallel of the runtime that PyTorch has loaded; null for the caller alone.
KVASIR_KERNEL void kvasir_use_threads_of(kvasir::Parallel parallel) { kvasir::parallel = parallel; }

// Reads count 64-bit words, a piece a task, and returns their exclusive or: what memory gives at most.
KVASIR_KERNEL uint64_t kvasir_read(const uint64_t* words, int64_t count, int64_t threads) {
    constexpr int64_t piece = 1 << 17;
    std::atomic<uint64_t> result{0};
    kvasir::parallel_for((count + piece - 1) / piece, threads, [&](int64_t index, int) {
        const uint64_t* from = words + index * piece;
        const int64_t size = count - index * piece < piece ? count - index * piece : piece;
        uint64_t folded = 0;
        for (int64_t word = 0; word < size; ++word) folded ^= from[word];
        result.fetch_xor(folded, std::memory_order_relaxed);
    });
    return result.load();
}
