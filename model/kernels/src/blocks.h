// Rows of quantized weights in groups, w = scale * code + offset: of int8 codes, or of the blocks of GGUF files.
// Sources: ggml-common.h and ggml-quants.c of llama.cpp, and block_types.py, whose numbers these equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
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

// Stored row of one output. from: null for an output of zeros. The others: only of int8 codes, arrays as in
// `UnpackedRow` or `SixBitRow`; null: zeros.
struct StoredRow {
    const uint8_t* from;
    Blocks blocks;
    const void *scales, *offsets, *factors, *offset_factors;
};

// Row in groups of 32. Zeros follow the codes up to a multiple of 64 inputs.
struct UnpackedRow {
    explicit UnpackedRow(int64_t inputs) : codes((inputs + 63) / 64 * 64), scales(codes.size() / 32), offsets(scales) {}

    std::vector<int8_t> codes;
    std::vector<float> scales, offsets;
};

// Row for int6.h: scales of 16 inputs, offsets of 32, and float16 factors of both for blocks of 256.
struct SixBitRow {
    explicit SixBitRow(int64_t inputs)
        : codes(inputs), scales(inputs / 16), offsets(inputs / 32), factors(inputs / 256), offset_factors(factors) {}

    std::vector<int8_t> codes, scales, offsets;
    std::vector<uint16_t> factors, offset_factors;
};

inline float half_at(const uint8_t* from) {
    half x;
    std::memcpy(&x, from, sizeof x);
    return to_float(x);
}

// Writes two codes for each of `count` bytes, a multiple of 16: those in the low halves, then those in the high halves,
// `number` added to each.
inline void split_bytes(const uint8_t* from, int count, int8_t* codes, int number = 0) {
    const __m128i low = _mm_set1_epi8(15), added = _mm_set1_epi8(static_cast<char>(number));
    for (int i = 0; i < count; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        const __m128i lows = _mm_and_si128(bytes, low), highs = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm_add_epi8(lows, added));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + count + i), _mm_add_epi8(highs, added));
    }
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
    split_bytes(others, 16, codes, HAS_FIFTH ? 0 : -8);
    if constexpr (HAS_FIFTH) {
        uint32_t bits;
        std::memcpy(&bits, fifth, sizeof bits);
        for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(codes[i] | (bits >> i & 1) << 4);
        if (!HAS_OFFSET) add_to(codes, 32, -16);
    } else if (HAS_OFFSET) {
        *offset += 8 * *scale;
    }
}

inline void unpack_q8_0(const uint8_t* block, int8_t* codes, float* scale, float* offset) {
    *scale = half_at(block);
    *offset = 0;
    std::memcpy(codes, block + 2, 32);
}

// Returns the scale and the minimum of a group of a Q4_K or Q5_K block: two factors and 6 bits for each of these.
inline std::pair<int, int> scale_and_minimum(const uint8_t* block, int group) {
    const uint8_t* packed = block + 4 + group % 4;
    if (group < 4) return {packed[0] & 63, packed[4] & 63};
    return {(packed[8] & 15) | packed[0] >> 6 << 4, packed[8] >> 4 | packed[4] >> 6 << 4};
}

// Unpacks the codes of a Q4_K or Q5_K block, from 0 on: after the scales come the fifth bits, and the others.
template <bool HAS_FIFTH>
inline void unpack_k_codes(const uint8_t* block, int8_t* codes) {
    const uint8_t *fifth = block + 16, *others = fifth + (HAS_FIFTH ? 32 : 0);
    for (int pair = 0; pair < 4; ++pair) split_bytes(others + pair * 32, 32, codes + pair * 64);
    if constexpr (HAS_FIFTH) {
        for (int i = 0; i < 256; ++i) codes[i] = static_cast<int8_t>(codes[i] | (fifth[i % 32] >> i / 32 & 1) << 4);
    }
}

// Unpacks the codes of a Q6_K block, from -32 to 31: the low four bits, then the others.
inline void unpack_q6_k_codes(const uint8_t* block, int8_t* codes) {
    for (int middle = 0; middle < 256; middle += 128) split_bytes(block + middle / 2, 64, codes + middle);
    for (int i = 0; i < 256; ++i) {
        const int high = block[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        codes[i] = static_cast<int8_t>((codes[i] | high << 4) - 32);
    }
}

template <bool HAS_FIFTH>
inline void unpack_k(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    unpack_k_codes<HAS_FIFTH>(block, codes);
    for (int group = 0; group < 8; ++group) {
        const auto [scale, minimum] = scale_and_minimum(block, group);
        scales[group] = half_at(block) * static_cast<float>(scale);
        offsets[group] = -(half_at(block + 2) * static_cast<float>(minimum));
        if (!HAS_FIFTH) offsets[group] += 8 * scales[group];
    }
    if (!HAS_FIFTH) add_to(codes, 256, -8);
}

// Unpacks a Q6_K block, whose groups of 16 are rounded to 8 bits in groups of 32.
inline void unpack_q6_k(const uint8_t* block, int8_t* codes, float* scales, float* offsets) {
    constexpr float TINY = 1e-30f;  // keeps a group of zeros from dividing by zero
    const float factor = half_at(block + 208);
    unpack_q6_k_codes(block, codes);
    for (int group = 0; group < 8; ++group) {
        float numbers[32], largest = TINY;
        for (int i = 0; i < 32; ++i) {
            const int at = group * 32 + i;
            const float scale = factor * static_cast<float>(static_cast<int8_t>(block[192 + at / 16]));
            numbers[i] = static_cast<float>(codes[at]) * scale;
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

template <typename Number>
inline void copy_or_zero(const void* from, int64_t count, std::vector<Number>& to) {
    if (from == nullptr) {
        std::fill(to.begin(), to.end(), Number(0));
    } else {
        std::copy_n(static_cast<const Number*>(from), count, to.begin());
    }
}

// Unpacks a stored row. Returns false if a scale or an offset is not finite.
inline bool unpack_stored(const StoredRow& stored, int64_t inputs, UnpackedRow& row) {
    const uint8_t* from = stored.from;
    const int64_t groups = (inputs + 31) / 32;
    switch (stored.blocks) {
        case Blocks::codes:
            std::memcpy(row.codes.data(), from, inputs);
            copy_or_zero(stored.scales, groups, row.scales);
            copy_or_zero(stored.offsets, groups, row.offsets);
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

// As above, for blocks of K types. Returns false if a factor is not finite.
inline bool unpack_stored(const StoredRow& stored, int64_t inputs, SixBitRow& row) {
    const auto blocks = static_cast<int64_t>(row.factors.size());
    if (stored.blocks == Blocks::codes) {
        std::memcpy(row.codes.data(), stored.from, inputs);
        copy_or_zero(stored.scales, inputs / 16, row.scales);
        copy_or_zero(stored.offsets, inputs / 32, row.offsets);
        copy_or_zero(stored.factors, blocks, row.factors);
        copy_or_zero(stored.offset_factors, blocks, row.offset_factors);
    }
    const uint8_t* from = stored.from;
    for (int64_t block = 0; block < blocks && stored.blocks != Blocks::codes; ++block) {
        int8_t *codes = &row.codes[block * 256], *scales = &row.scales[block * 16], *offsets = &row.offsets[block * 8];
        if (stored.blocks == Blocks::q6_k) {
            unpack_q6_k_codes(from, codes);
            std::memcpy(scales, from + 192, 16);
            std::memset(offsets, 0, 8);
            std::memcpy(&row.factors[block], from + 208, 2);
            row.offset_factors[block] = 0;
            from += 210;
            continue;
        }
        const bool has_fifth = stored.blocks == Blocks::q5_k;
        has_fifth ? unpack_k_codes<true>(from, codes) : unpack_k_codes<false>(from, codes);
        for (int group = 0; group < 8; ++group) {
            const auto [scale, minimum] = scale_and_minimum(from, group);
            scales[2 * group] = scales[2 * group + 1] = static_cast<int8_t>(scale);
            offsets[group] = static_cast<int8_t>(-minimum);
        }
        std::memcpy(&row.factors[block], from, 2);
        std::memcpy(&row.offset_factors[block], from + 2, 2);
        from += has_fifth ? 176 : 144;
    }
    constexpr uint16_t EXPONENT = 0x7c00;
    const auto is_finite = [](uint16_t bits) { return (bits & EXPONENT) != EXPONENT; };
    return std::all_of(row.factors.begin(), row.factors.end(), is_finite) &&
           std::all_of(row.offset_factors.begin(), row.offset_factors.end(), is_finite);
}

}  // namespace kvasir
