// Packing of matrices into panels, and of weights in groups into strips, on all threads.
#include <atomic>

#include "blocks.h"
#include "grouped.h"
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

namespace {

// Writes a row into its place in a strip, and returns the output's scale: the smallest with which no multiplier, no
// offset and no sum of products with int8 inputs overflows, whatever the codes and the inputs are.
template <bool HAS_OFFSETS>
float write_row(Int4<HAS_OFFSETS>, const UnpackedRow& row, int64_t inputs, int64_t place, uint8_t* strip) {
    using Kind = Int4<HAS_OFFSETS>;
    constexpr float TINY = 1e-30f;  // prevents a division by zero where all weights are zero
    constexpr uint64_t HALF = 0x0f0f0f0f;
    const int64_t groups = static_cast<int64_t>(row.scales.size());
    float largest_scale = 0, largest_offset = 0, largest = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const float scale = std::fabs(row.scales[group]), offset = std::fabs(row.offsets[group]);
        largest_scale = std::max(largest_scale, scale);
        largest_offset = std::max(largest_offset, offset);
        largest = std::max(largest, scale * 8 + offset);
    }
    const float sum = largest * static_cast<float>(127 * inputs / (0.97 * (int64_t{1} << 31)));
    const float scale = std::max({largest_scale / 127, largest_offset / 32767, sum, TINY});
    for (int64_t group = 0; group < groups; ++group) {
        uint8_t* step = strip + group / 2 * Kind::BYTES;
        uint8_t* codes = step + (group % 2 * STRIP_BLOCKS + place / LANES) * Kind::BLOCK + place % LANES * 4;
        for (int64_t eight = 0; eight < GROUP_SIZE / 8; ++eight) {
            uint64_t both;
            std::memcpy(&both, &row.codes[group * GROUP_SIZE + eight * 8], 8);
            // Four codes in the low halves of four bytes, the next four in the high halves; 8 is added to each.
            const auto word = static_cast<uint32_t>((both & HALF) | (both >> 32 & HALF) << 4) ^ 0x88888888u;
            std::memcpy(codes + eight * LANES * 4, &word, 4);
        }
        const int64_t pair = place * 2 + 1 - group % 2;
        const auto multiplier = static_cast<int8_t>(std::rint(row.scales[group] / scale));
        step[Kind::MULTIPLIERS + pair] = static_cast<uint8_t>(multiplier);
        if constexpr (HAS_OFFSETS) {
            const auto offset = static_cast<int16_t>(std::rint(row.offsets[group] / scale));
            std::memcpy(step + Kind::OFFSETS + pair * 2, &offset, 2);
        }
    }
    return scale;
}

// As above. The scale is a power of two, with which the output's largest scale or offset is 2^11 to 2^12.
template <bool HAS_OFFSETS>
float write_row(Grouped<HAS_OFFSETS>, const UnpackedRow& row, int64_t inputs, int64_t place, uint8_t* strip) {
    using Kind = Grouped<HAS_OFFSETS>;
    constexpr int EXPONENT = 12, LEAST = -120;  // 2^120 and 2^-120 are normal
    const int64_t groups = (inputs + GROUP_SIZE - 1) / GROUP_SIZE;
    float largest = 0;
    for (int64_t group = 0; group < groups; ++group) {
        largest = std::max({largest, std::fabs(row.scales[group]), std::fabs(row.offsets[group])});
    }
    int exponent;
    std::frexp(largest, &exponent);
    exponent = std::max(exponent - EXPONENT, LEAST);
    const float factor = std::ldexp(1.f, -exponent);
    const auto write_half = [&](uint8_t* to, float x) {
        const auto bits = static_cast<uint16_t>(_cvtss_sh(x * factor, _MM_FROUND_TO_NEAREST_INT));
        std::memcpy(to, &bits, 2);
    };
    for (int64_t group = 0; group < groups; ++group) {
        uint8_t* step = strip + group * Kind::BYTES;
        for (int64_t four = 0; four < GROUP_SIZE / 4; ++four) {
            uint32_t codes;
            std::memcpy(&codes, &row.codes[group * GROUP_SIZE + four * 4], 4);
            codes ^= 0x80808080u;  // adds 128 to each
            std::memcpy(step + four * Kind::FOUR + place * 4, &codes, 4);
        }
        write_half(step + Kind::SCALES + place * 2, row.scales[group]);
        if constexpr (HAS_OFFSETS) write_half(step + Kind::OFFSETS + place * 2, row.offsets[group]);
    }
    return std::ldexp(1.f, exponent);
}

// As above. The scale is 1.
template <bool HAS_OFFSETS>
float write_row(Int6<HAS_OFFSETS>, const SixBitRow& row, int64_t inputs, int64_t place, uint8_t* strip) {
    using Kind = Int6<HAS_OFFSETS>;
    for (int64_t block = 0; block < inputs / Kind::INPUTS; ++block) {
        uint8_t* step = strip + block * Kind::BYTES;
        std::memcpy(step + place * 2, &row.factors[block], 2);
        for (int64_t group = 0; group < Kind::GROUPS; ++group) {
            const int64_t at = block * Kind::GROUPS + group;
            step[Kind::multipliers(group) + place] = static_cast<uint8_t>(row.scales[at]);
            uint32_t fours[4];
            std::memcpy(fours, &row.codes[at * 16], 16);
            for (uint32_t& four : fours) four = (four ^ 0x20202020u) & 0x3f3f3f3fu;  // adds 32 to each code
            uint8_t* codes = step + Kind::codes(group) + place / LANES * Kind::BLOCK + place % LANES * 4;
            for (int part = 0; part < 3; ++part) {
                const uint32_t word = fours[part] | (fours[3] >> 2 * part & 0x03030303u) << 6;
                std::memcpy(codes + part * 64, &word, 4);
            }
        }
        if constexpr (HAS_OFFSETS) {
            for (int64_t pair = 0; pair < Kind::GROUPS / 2; ++pair) {
                const int8_t offset = row.offsets[block * Kind::GROUPS / 2 + pair];
                step[Kind::OFFSETS + pair * STRIP + place] = static_cast<uint8_t>(offset);
            }
            std::memcpy(step + Kind::OFFSET_FACTORS + place * 2, &row.offset_factors[block], 2);
        }
    }
    return 1;
}

// See kvasir_pack_groups.
template <typename Kind, typename Row>
bool pack_groups(const StoredRow* rows, int64_t strips, int64_t inputs, uint8_t* target, float* scales,
                 int64_t threads) {
    const int64_t bytes = (inputs + Kind::INPUTS - 1) / Kind::INPUTS * Kind::BYTES;
    std::atomic<bool> are_finite{true};
    parallel_for(strips, threads, [&](int64_t strip, int) {
        Row row(inputs);
        const Row zeros(inputs);
        for (int64_t place = 0; place < STRIP; ++place) {
            const StoredRow& stored = rows[strip * STRIP + place];
            const bool is_stored = stored.from != nullptr;
            if (is_stored && !unpack_stored(stored, inputs, row)) are_finite = false;
            const float scale = write_row(Kind(), is_stored ? row : zeros, inputs, place, target + strip * bytes);
            scales[strip * STRIP + place] = is_stored ? scale : 0;
        }
    });
    return are_finite;
}

}  // namespace

// Packs weights in groups into the strips of int4.h (bits 4), int6.h (6) or grouped.h (8). rows, scales: one for each padded
// output. Returns false if a scale or an offset is not finite.
KVASIR_KERNEL bool kvasir_pack_groups(const StoredRow* rows, int64_t strips, int64_t inputs, int64_t bits,
                                      bool has_offsets, uint8_t* target, float* scales, int64_t threads) {
    const auto pack = bits == 4   ? (has_offsets ? pack_groups<Int4<true>, UnpackedRow> : pack_groups<Int4<false>, UnpackedRow>)
                      : bits == 6 ? (has_offsets ? pack_groups<Int6<true>, SixBitRow> : pack_groups<Int6<false>, SixBitRow>)
                                  : (has_offsets ? pack_groups<Grouped<true>, UnpackedRow> : pack_groups<Grouped<false>, UnpackedRow>);
    return pack(rows, strips, inputs, target, scales, threads);
}
