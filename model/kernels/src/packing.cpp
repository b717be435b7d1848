// Packing of matrices into panels, and of codes of 4 or 6 bits into strips, on all threads.
#include <algorithm>

#include "int4.h"
#include "int6.h"

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

// Calls work(codes, step, output) with the INPUTS codes of each output in each step of its strip, to be packed there.
// rows: address of the codes (int8) of each padded output, or null for zeros. A step of a strip has step_bytes bytes.
template <int64_t INPUTS, typename Work>
void pack_strips(const int8_t* const* rows, int64_t strips, int64_t inputs, uint8_t* target, int64_t step_bytes,
                 int64_t threads, const Work& work) {
    const int64_t steps = (inputs + INPUTS - 1) / INPUTS;
    parallel_for(strips, threads, [&](int64_t strip, int) {
        for (int64_t task = 0; task < steps * STRIP; ++task) {
            const int64_t step = task / STRIP, output = task % STRIP, count = std::min(INPUTS, inputs - step * INPUTS);
            const int8_t* from = rows[strip * STRIP + output];
            int8_t codes[INPUTS] = {};
            if (from != nullptr) std::memcpy(codes, from + step * INPUTS, count);
            work(codes, target + (strip * steps + step) * step_bytes, output);
        }
    });
}

// Copies codes of 4 bits, -8 to 7, to the strips of int4.h. See pack_strips.
KVASIR_KERNEL void kvasir_pack_int4(const int8_t* const* rows, int64_t strips, int64_t inputs, uint8_t* target,
                                    int64_t step_bytes, int64_t threads) {
    constexpr int64_t EIGHTS = GROUP_SIZE / 8, HALF = 0x0f0f0f0f;
    const auto pack = [](const int8_t* codes, uint8_t* to, int64_t output) {
        for (int64_t eight = 0; eight < 2 * EIGHTS; ++eight) {
            int64_t both;
            std::memcpy(&both, codes + eight * 8, 8);
            // Four codes in the low halves of four bytes, the next four in the high halves; 8 is added to each.
            const auto word = static_cast<uint32_t>((both & HALF) | (both >> 32 & HALF) << 4) ^ 0x88888888u;
            const int64_t block = eight / EIGHTS * STRIP_BLOCKS + output / LANES;
            std::memcpy(to + ((block * EIGHTS + eight % EIGHTS) * LANES + output % LANES) * 4, &word, 4);
        }
    };
    pack_strips<2 * GROUP_SIZE>(rows, strips, inputs, target, step_bytes, threads, pack);
}

// Copies codes of 6 bits, -32 to 31, to the strips of int6.h. See pack_strips.
KVASIR_KERNEL void kvasir_pack_int6(const int8_t* const* rows, int64_t strips, int64_t inputs, uint8_t* target,
                                    int64_t step_bytes, int64_t threads) {
    using Kind = Int6<false>;
    const auto pack = [](const int8_t* codes, uint8_t* step, int64_t output) {
        for (int64_t group = 0; group < Kind::GROUPS; ++group, codes += 16) {
            uint32_t fours[4];
            std::memcpy(fours, codes, 16);
            for (uint32_t& four : fours) four = (four ^ 0x20202020u) & 0x3f3f3f3fu;  // adds 32 to each code
            uint8_t* to = Kind::codes(step, group) + output / LANES * Kind::BLOCK + output % LANES * 4;
            for (int part = 0; part < 3; ++part) {
                const uint32_t word = fours[part] | (fours[3] >> 2 * part & 0x03030303u) << 6;
                std::memcpy(to + part * 64, &word, 4);
            }
        }
    };
    pack_strips<Kind::INPUTS>(rows, strips, inputs, target, step_bytes, threads, pack);
}
