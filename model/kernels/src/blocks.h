// Rows of quantized weights in groups of 32 inputs, w = scale * code + offset: of int8 codes, or of the blocks of GGUF
// files. Sources: ggml-common.h and ggml-quants.c of llama.cpp, and block_types.py, whose numbers these equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace kvasir {

// Types of blocks, with their numbers in GGUF files. codes: no blocks, but int8 codes.
enum class Blocks : int64_t {
    codes = 0,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14
};

// Stored row of one output. from: null for an output of zeros. scales, offsets: of int8 codes; offsets may be null.
struct StoredRow {
    const uint8_t* from;
    Blocks blocks;
    const float *scales, *offsets;
};

// Row with its codes unpacked. Zeros follow the codes up to a multiple of 64 inputs.
struct UnpackedRow {
    explicit UnpackedRow(int64_t inputs) : codes((inputs + 63) / 64 * 64), scales(codes.size() / 32), offsets(scales) {}

    std::vector<int8_t> codes;
    std::vector<float> scales, offsets;
};

inline float half_at(const uint8_t* from) {
    half x;
    std::memcpy(&x, from, sizeof x);
    return to_float(x);
}

// Writes two codes for each of `count` bytes: those in the low halves, then those in the high halves.
inline void split_bytes(const uint8_t* from, int count, int8_t* codes) {
    for (int i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(from[i] & 15);
    for (int i = 0; i < count; ++i) codes[count + i] = static_cast<int8_t>(from[i] >> 4);
}

inline void add_to(int8_t* codes, int count, int number) {
    for (int i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(codes[i] + number);
}

// Unpacks one block of 32 numbers of 4 or 5 bits: a scale, an offset if it has one, the fifth bits, and the others.
template <bool HAS_OFFSET, bool HAS_FIFTH>
inline void unpack_32(const uint8_t* block, int8_t* codes, float* scale, float* offset) {
    const uint8_t *fifth = block + (HAS_OFFSET ? 4 : 2), *others = fifth + (HAS_FIFTH ? 4 : 0);
    *scale = half_at(block);
    *offset = HAS_OFFSET ? half_at(block + 2) : 0.f;
    split_bytes(others, 16, codes);
    if constexpr (HAS_FIFTH) {
        uint32_t bits;
        std::memcpy(&bits, fifth, sizeof bits);
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(codes[i] | (bits >> i & 1) << 4);
        if (!HAS_OFFSET) add_to(codes, 32, -16);
    } else {
        add_to(codes, 32, -8);
        if (HAS_OFFSET) *offset += 8 * *scale;
    }
}

inline void unpack_q8_0(const uint8_t* block, int8_t* codes, float* scale, float* offset) {
    *scale = half_at(block);
    *offset = 0;
    std::memcpy(codes, block + 2, 32);
}

// Unpacks a Q4_K or Q5_K block: two factors, 6 bits for each scale and minimum, the fifth bits, and the others.
template <bool HAS_FIFTH>
inline void unpack_k(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    const uint8_t *packed = block + 4, *fifth = block + 16, *others = fifth + (HAS_FIFTH ? 32 : 0);
    for (int group = 0; group < 8; ++group) {
        const int low = group % 4;
        const int scale = group < 4 ? packed[low] & 63 : (packed[8 + low] & 15) | packed[low] >> 6 << 4;
        const int minimum = group < 4 ? packed[4 + low] & 63 : packed[8 + low] >> 4 | packed[4 + low] >> 6 << 4;
        scales[group] = half_at(block) * static_cast<float>(scale);
        offsets[group] = -(half_at(block + 2) * static_cast<float>(minimum));
        if (!HAS_FIFTH) offsets[group] += 8 * scales[group];
        if (group % 2 == 0) split_bytes(others + group * 16, 32, codes + group * 32);
    }
    if constexpr (HAS_FIFTH) {
        for (int i = 0; i < 256; ++i) codes[i] = static_cast<int8_t>(codes[i] | (fifth[i % 32] >> i / 32 & 1) << 4);
    } else {
        add_to(codes, 256, -8);
    }
}

// Unpacks a Q6_K block, whose groups of 16 are rounded to 8 bits in groups of 32.
inline void unpack_q6_k(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    constexpr float TINY = 1e-30f;  // keeps a group of zeros from dividing by zero
    const float factor = half_at(block + 208);
    for (int middle = 0; middle < 256; middle += 128) split_bytes(block + middle / 2, 64, codes + middle);
    for (int group = 0; group < 8; ++group) {
        float numbers[32], largest = TINY;
        for (int i = 0; i < 32; ++i) {
            const int at = group * 32 + i, high = block[128 + at / 128 * 32 + i] >> at % 128 / 32 * 2 & 3;
            const float scale = factor * static_cast<float>(static_cast<int8_t>(block[192 + at / 16]));
            numbers[i] = static_cast<float>((codes[at] | high << 4) - 32) * scale;
            largest = std::max(largest, std::fabs(numbers[i]));
        }
        scales[group] = largest / 127 + 0 * factor;  // NaN if the factor is not finite
        offsets[group] = 0;
        for (int i = 0; i < 32; ++i) codes[group * 32 + i] = static_cast<int8_t>(std::rint(numbers[i] / scales[group]));
    }
}

template <int NUMBERS, int BYTES, typename Unpack>
inline void unpack_blocks(const uint8_t* from, int64_t inputs, UnpackedRow& row, const Unpack& unpack) {
    for (int64_t at = 0; at < inputs; at += NUMBERS, from += BYTES) {
        unpack(from, &row.codes[at], &row.scales[at / 32], &row.offsets[at / 32]);
    }
}

// Unpacks a stored row. Returns false if a scale or an offset is not finite.
inline bool unpack_stored(const StoredRow& stored, int64_t inputs, UnpackedRow& row) {
    const uint8_t* from = stored.from;
    const int64_t groups = (inputs + 31) / 32;
    switch (stored.blocks) {
        case Blocks::codes:
            std::memcpy(row.codes.data(), from, inputs);
            std::copy_n(stored.scales, groups, row.scales.begin());
            if (stored.offsets == nullptr) {
                std::fill(row.offsets.begin(), row.offsets.end(), 0.f);
            } else {
                std::copy_n(stored.offsets, groups, row.offsets.begin());
            }
            break;
        case Blocks::q4_0: unpack_blocks<32, 18>(from, inputs, row, unpack_32<false, false>); break;
        case Blocks::q4_1: unpack_blocks<32, 20>(from, inputs, row, unpack_32<true, false>); break;
        case Blocks::q5_0: unpack_blocks<32, 22>(from, inputs, row, unpack_32<false, true>); break;
        case Blocks::q5_1: unpack_blocks<32, 24>(from, inputs, row, unpack_32<true, true>); break;
        case Blocks::q4_k: unpack_blocks<256, 144>(from, inputs, row, unpack_k<false>); break;
        case Blocks::q5_k: unpack_blocks<256, 176>(from, inputs, row, unpack_k<true>); break;
        case Blocks::q6_k: unpack_blocks<256, 210>(from, inputs, row, unpack_q6_k); break;
        case Blocks::q8_0: unpack_blocks<32, 34>(from, inputs, row, unpack_q8_0); break;
    }
    const auto is_finite = [](float x) { return std::isfinite(x); };
    return std::all_of(row.scales.begin(), row.scales.begin() + groups, is_finite) &&
           std::all_of(row.offsets.begin(), row.offsets.begin() + groups, is_finite);
}

}  // namespace kvasir
