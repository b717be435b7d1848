// Packing of matrices into panels, on all threads.
#include <algorithm>

#include "kernel.h"

using namespace kvasir;

// Copies a float32, bfloat16 or int8 matrix to `target`, in panels. rows: address of the weights of each padded output,
// or null for zeros. words: groups of inputs of a row, which have 4 bytes in each of these types.
KVASIR_KERNEL void kvasir_pack(const char* const* rows, int64_t panels, int64_t words, int32_t* target,
                               int64_t threads) {
    constexpr int64_t BLOCK = 64;  // words of a row at a time: 64 rows of 256 bytes stay in the L1 cache
    parallel_for(panels, threads, [&](int64_t panel, int) {
        for (int64_t first = 0; first < words; first += BLOCK) {
            const int64_t count = std::min(BLOCK, words - first);
            int32_t* to = target + (panel * words + first) * PANEL;
            for (int64_t row = 0; row < PANEL; ++row) {
                const char* from = rows[panel * PANEL + row];
                for (int64_t word = 0; word < count; ++word) {
                    int32_t weights = 0;
                    if (from != nullptr) std::memcpy(&weights, from + (first + word) * 4, 4);
                    to[word * PANEL + row] = weights;
                }
            }
        }
    });
}
