// Packing of matrices into panels, and of codes of 4 bits into strips, on all threads.
#include <algorithm>

#include "int4.h"

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

// Copies codes of 4 bits (int8, -8 to 7) to the strips of int4.h, two in a byte. rows: address of the codes of each
// padded output, or null for zeros. A step of a strip has step_bytes bytes; the codes are the first of them.
KVASIR_KERNEL void kvasir_pack_int4(const int8_t* const* rows, int64_t strips, int64_t inputs, char* target,
                                    int64_t step_bytes, int64_t threads) {
    constexpr int64_t EIGHTS = GROUP_SIZE / 8, INPUTS = 2 * GROUP_SIZE, HALF = 0x0f0f0f0f;
    const int64_t steps = (inputs + INPUTS - 1) / INPUTS;
    parallel_for(strips, threads, [&](int64_t strip, int) {
        for (int64_t task = 0; task < steps * STRIP; ++task) {
            const int64_t step = task / STRIP, output = task % STRIP, count = std::min(INPUTS, inputs - step * INPUTS);
            const int8_t* from = rows[strip * STRIP + output];
            int8_t codes[INPUTS] = {};
            if (from != nullptr) std::memcpy(codes, from + step * INPUTS, count);
            char* to = target + (strip * steps + step) * step_bytes;
            for (int64_t eight = 0; eight < 2 * EIGHTS; ++eight) {
                int64_t both;
                std::memcpy(&both, codes + eight * 8, 8);
                // Four codes in the low halves of four bytes, the next four in the high halves; 8 is added to each.
                const auto word = static_cast<uint32_t>((both & HALF) | (both >> 32 & HALF) << 4) ^ 0x88888888u;
                const int64_t block = eight / EIGHTS * STRIP_BLOCKS + output / LANES;
                std::memcpy(to + ((block * EIGHTS + eight % EIGHTS) * LANES + output % LANES) * 4, &word, 4);
            }
        }
    });
}
