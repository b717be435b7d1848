// float16 (IEEE 754 binary16) for the KV-cache: converted from float on writes, and to float on reads.
#pragma once

#include "lanes.h"

namespace kvasir {

struct half {
    uint16_t bits;
};

constexpr float LARGEST_HALF = 65504.f;

inline float to_float(half x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
    uint32_t bits;
    if (magnitude >= 0x7c00) {  // infinity or NaN
        bits = 0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000 : 0);
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: a multiple of 2^-24
        const float small = static_cast<float>(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &small, sizeof bits);
    }
    bits |= sign;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to nearest, ties to even. Values beyond the largest half saturate to it, infinity too; NaN stays NaN.
inline half to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff))};
    if (magnitude >= 0x477fe000) return {static_cast<uint16_t>(sign | 0x7bff)};
    if (magnitude >= 0x38800000) {
        const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return {static_cast<uint16_t>(sign | (rounded - (112u << 23)) >> 13)};
    }
    float small;
    std::memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;  // the last bit of the sum is worth 2^-24
    uint32_t sum;
    std::memcpy(&sum, &small, sizeof sum);
    return {static_cast<uint16_t>(sign | (sum - 0x3f000000))};
}

#if defined(__AVX512F__)

inline Lanes load(const half* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline void store(half* to, Lanes x) {
    // If one operand is NaN, max and min return the second operand: NaN stays NaN.
    const __m512 above = _mm512_max_ps(_mm512_set1_ps(-LARGEST_HALF), x.v);
    const __m512 within = _mm512_min_ps(_mm512_set1_ps(LARGEST_HALF), above);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(within, _MM_FROUND_TO_NEAREST_INT));
}

// Returns eight columns, starting at `left`, of sixteen rows at any addresses.
inline void transpose(const half* const (&rows)[LANES], int left, Lanes (&columns)[8]) {
    __m512i every_fourth[4];  // eight numbers of each of the rows n, n + 4, n + 8, n + 12
    for (int n = 0; n < 4; ++n) {
        auto numbers = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + left)); };
        __m512i four = _mm512_castsi128_si512(numbers(n));
        four = _mm512_inserti32x4(four, numbers(n + 4), 1);
        four = _mm512_inserti32x4(four, numbers(n + 8), 2);
        every_fourth[n] = _mm512_inserti32x4(four, numbers(n + 12), 3);
    }
    const __m512i low = _mm512_unpacklo_epi16(every_fourth[0], every_fourth[1]);
    const __m512i high = _mm512_unpackhi_epi16(every_fourth[0], every_fourth[1]);
    const __m512i next_low = _mm512_unpacklo_epi16(every_fourth[2], every_fourth[3]);
    const __m512i next_high = _mm512_unpackhi_epi16(every_fourth[2], every_fourth[3]);
    // For every four rows: four numbers of one column, then four of the next column.
    const __m512i two[4] = {_mm512_unpacklo_epi32(low, next_low), _mm512_unpackhi_epi32(low, next_low),
                            _mm512_unpacklo_epi32(high, next_high), _mm512_unpackhi_epi32(high, next_high)};
    const __m512i apart = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int n = 0; n < 4; ++n) {
        const __m512i both = _mm512_permutexvar_epi64(apart, two[n]);
        columns[2 * n].v = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
        columns[2 * n + 1].v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
    }
}

#elif defined(__AVX2__)

inline __m256 widen(const half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Lanes load(const half* from) { return {widen(from), widen(from + 8)}; }
inline void narrow(half* to, __m256 x) {
    // If one operand is NaN, max and min return the second operand: NaN stays NaN.
    const __m256 above = _mm256_max_ps(_mm256_set1_ps(-LARGEST_HALF), x);
    const __m256 within = _mm256_min_ps(_mm256_set1_ps(LARGEST_HALF), above);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(within, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(half* to, Lanes x) {
    narrow(to, x.low);
    narrow(to + 8, x.high);
}

inline void transpose(const half* const (&rows)[LANES], int left, Lanes (&columns)[8]) {
    for (int part = 0; part < 2; ++part) {
        __m256i every_fourth[4];  // of the rows n and n + 4 of eight rows
        for (int n = 0; n < 4; ++n) {
            auto numbers = [&](int row) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[8 * part + row] + left));
            };
            every_fourth[n] = _mm256_inserti128_si256(_mm256_castsi128_si256(numbers(n)), numbers(n + 4), 1);
        }
        const __m256i low = _mm256_unpacklo_epi16(every_fourth[0], every_fourth[1]);
        const __m256i high = _mm256_unpackhi_epi16(every_fourth[0], every_fourth[1]);
        const __m256i next_low = _mm256_unpacklo_epi16(every_fourth[2], every_fourth[3]);
        const __m256i next_high = _mm256_unpackhi_epi16(every_fourth[2], every_fourth[3]);
        const __m256i two[4] = {_mm256_unpacklo_epi32(low, next_low), _mm256_unpackhi_epi32(low, next_low),
                                _mm256_unpacklo_epi32(high, next_high), _mm256_unpackhi_epi32(high, next_high)};
        for (int n = 0; n < 4; ++n) {
            const __m256i both = _mm256_permute4x64_epi64(two[n], 0xd8);
            const __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
            const __m256 second = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
            (part == 0 ? columns[2 * n].low : columns[2 * n].high) = first;
            (part == 0 ? columns[2 * n + 1].low : columns[2 * n + 1].high) = second;
        }
    }
}

#else

inline Lanes load(const half* from) {
    float buffer[LANES];
    for (int lane = 0; lane < LANES; ++lane) buffer[lane] = to_float(from[lane]);
    return load(buffer);
}
inline void store(half* to, Lanes x) {
    for (int lane = 0; lane < LANES; ++lane) to[lane] = to_half(x.v[lane]);
}

inline void transpose(const half* const (&rows)[LANES], int left, Lanes (&columns)[8]) {
    for (int column = 0; column < 8; ++column) {
        float buffer[LANES];
        for (int row = 0; row < LANES; ++row) buffer[row] = to_float(rows[row][left + column]);
        columns[column] = load(buffer);
    }
}

#endif

inline Lanes load(const half* from, int count) {
    half buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(half));
    return load(buffer);
}

// Converts `count` numbers to the type of the cache or the output.
inline void put(const float* from, int64_t count, bf16* to) {
    for (int64_t at = 0; at < count; ++at) to[at] = to_bf16(from[at]);
}
inline void put(const float* from, int64_t count, half* to) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) store(to + at, load(from + at));
    for (; at < count; ++at) to[at] = to_half(from[at]);
}
template <typename T>
void put(const T* from, int64_t count, T* to) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace kvasir
