// Lanes: sixteen floats as one value, on every level. Sums over lanes have the same order on every level.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvasir {

constexpr int LANES = 16;

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline bf16 to_bf16(float x) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__)

struct Lanes {
    __m512 v;
};

inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes load(const float* from, int count) {  // lanes from count on are zero
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)};
}
inline Lanes load(const bf16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Returns the first numbers of sixteen pairs, or the second ones.
inline Lanes load_of_pairs(const bf16* from, bool is_second) {
    const __m512i pairs = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(is_second ? _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                                          : _mm512_slli_epi32(pairs, 16))};
}
inline void store(float* to, Lanes x) { _mm512_storeu_ps(to, x.v); }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
// Returns x in the lanes from first to end - 1, and y in the other lanes. 0 <= first <= end <= 16.
inline Lanes select(int first, int end, Lanes x, Lanes y) {
    const auto mask = static_cast<__mmask16>(((1u << end) - 1) & ~((1u << first) - 1));
    return {_mm512_mask_blend_ps(mask, y.v, x.v)};
}
inline Lanes round(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes scale_by_power(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#elif defined(__AVX2__)

struct Lanes {
    __m256 low, high;
};

inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Lanes load(const float* from, int count) {
    alignas(32) float buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(float));
    return load(buffer);
}
inline __m256 widen(const bf16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes load(const bf16* from) { return {widen(from), widen(from + 8)}; }
inline __m256 widen_of_pairs(const bf16* from, bool is_second) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_castsi256_ps(is_second ? _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))
                                         : _mm256_slli_epi32(pairs, 16));
}
inline Lanes load_of_pairs(const bf16* from, bool is_second) {
    return {widen_of_pairs(from, is_second), widen_of_pairs(from + 16, is_second)};
}
inline void store(float* to, Lanes x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes select(int first, int end, Lanes x, Lanes y) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    auto mask = [&](int offset) {
        const __m256i at = _mm256_add_epi32(index, _mm256_set1_epi32(offset));
        const __m256i from = _mm256_cmpgt_epi32(at, _mm256_set1_epi32(first - 1));
        return _mm256_castsi256_ps(_mm256_and_si256(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), at)));
    };
    return {_mm256_blendv_ps(y.low, x.low, mask(0)), _mm256_blendv_ps(y.high, x.high, mask(8))};
}
inline Lanes round(Lanes x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
}
inline __m256 scale_by_power(__m256 x, __m256 n) {  // -126 <= n <= 127
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline Lanes scale_by_power(Lanes x, Lanes n) { return {scale_by_power(x.low, n.low), scale_by_power(x.high, n.high)}; }

#else

// GCC vector extensions: the compiler splits the vectors into registers of the target CPU.
typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(64), aligned(4)));

struct Lanes {
    Floats v;
};

inline Lanes splat(float x) { return {x - Floats{}}; }
inline Lanes load(const float* from) {
    Lanes result;
    std::memcpy(&result.v, from, sizeof result.v);
    return result;
}
inline Lanes load(const float* from, int count) {
    float buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(float));
    return load(buffer);
}
inline Lanes load(const bf16* from) {
    float buffer[LANES];
    for (int lane = 0; lane < LANES; ++lane) buffer[lane] = to_float(from[lane]);
    return load(buffer);
}
inline Lanes load_of_pairs(const bf16* from, bool is_second) {
    float buffer[LANES];
    for (int lane = 0; lane < LANES; ++lane) buffer[lane] = to_float(from[2 * lane + is_second]);
    return load(buffer);
}
inline void store(float* to, Lanes x) { std::memcpy(to, &x.v, sizeof x.v); }
inline Lanes add(Lanes a, Lanes b) { return {a.v + b.v}; }
inline Lanes sub(Lanes a, Lanes b) { return {a.v - b.v}; }
inline Lanes mul(Lanes a, Lanes b) { return {a.v * b.v}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {a.v * b.v + c.v}; }
inline Lanes max(Lanes a, Lanes b) { return {a.v > b.v ? a.v : b.v}; }
inline Lanes select(int first, int end, Lanes x, Lanes y) {
    const Integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {(lane >= first) & (lane < end) ? x.v : y.v};
}
inline Lanes round(Lanes x) {  // |x| < 2^22; the added constant leaves no mantissa bits for a fraction
    const Floats large = splat(12582912.f).v;
    return {(x.v + large) - large};
}
inline Lanes scale_by_power(Lanes x, Lanes n) {  // -126 <= n <= 127
    const Integers exponent = (__builtin_convertvector(n.v, Integers) + 127) << 23;
    Lanes power;
    std::memcpy(&power.v, &exponent, sizeof exponent);
    return mul(x, power);
}

#endif

inline Lanes zeros() { return splat(0.f); }

inline Lanes load(const bf16* from, int count) {
    bf16 buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(bf16));
    return load(buffer);
}

// Reductions fold the upper half onto the lower half: the same tree on every level.
#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 low_half(Lanes x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(Lanes x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
inline __m256 low_half(Lanes x) { return x.low; }
inline __m256 high_half(Lanes x) { return x.high; }
#endif
inline float sum(Lanes x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Lanes x) {
    const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
template <typename Fold>
inline float folded(Lanes x, const Fold& fold) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) x.v[lane] = fold(x.v[lane], x.v[lane + half]);
    }
    return x.v[0];
}
inline float sum(Lanes x) {
    return folded(x, [](float a, float b) { return a + b; });
}
inline float largest(Lanes x) {
    return folded(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

// 2^x for x <= 127; x below -126 is clamped to -126. x is n + rest with an integer n and |rest| <= 0.5. A polynomial of
// degree 5 approximates 2^rest. It is the minimax polynomial of the relative error among those that are 1 at 0 (Remez
// 1934). Its largest relative error is 9.1e-8; rounding to float has up to 6.0e-8.
inline Lanes exp2(Lanes x) {
    const Lanes bounded = max(splat(-126.f), x);  // NaN stays NaN
    const Lanes n = round(bounded);
    const Lanes rest = sub(bounded, n);
    Lanes power = splat(1.32647269e-3f);
    for (float coefficient : {9.67151266e-3f, 5.55073374e-2f, 2.40222421e-1f, 6.93146978e-1f, 1.f}) {
        power = fma(power, rest, splat(coefficient));
    }
    return scale_by_power(power, n);
}

// Returns four columns, starting at `left`, of sixteen rows of floats at any addresses.
inline void transpose(const float* const (&rows)[LANES], int left, Lanes (&columns)[4]) {
#if defined(__AVX512F__)
    __m512 every_fourth[4];  // four floats of each of the rows n, n + 4, n + 8, n + 12
    for (int n = 0; n < 4; ++n) {
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(rows[n] + left));
        four = _mm512_insertf32x4(four, _mm_loadu_ps(rows[n + 4] + left), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps(rows[n + 8] + left), 2);
        every_fourth[n] = _mm512_insertf32x4(four, _mm_loadu_ps(rows[n + 12] + left), 3);
    }
    auto pairs = [](__m512 x) { return _mm512_castps_pd(x); };
    const __m512d low = pairs(_mm512_unpacklo_ps(every_fourth[0], every_fourth[1]));
    const __m512d high = pairs(_mm512_unpackhi_ps(every_fourth[0], every_fourth[1]));
    const __m512d next_low = pairs(_mm512_unpacklo_ps(every_fourth[2], every_fourth[3]));
    const __m512d next_high = pairs(_mm512_unpackhi_ps(every_fourth[2], every_fourth[3]));
    columns[0].v = _mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low));
    columns[1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low));
    columns[2].v = _mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high));
    columns[3].v = _mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high));
#elif defined(__AVX2__)
    for (int half = 0; half < 2; ++half) {
        __m256 every_fourth[4];
        for (int n = 0; n < 4; ++n) {
            const float* const* of = rows + 8 * half + n;
            every_fourth[n] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(of[0] + left)),
                                                   _mm_loadu_ps(of[4] + left), 1);
        }
        const __m256 low = _mm256_unpacklo_ps(every_fourth[0], every_fourth[1]);
        const __m256 high = _mm256_unpackhi_ps(every_fourth[0], every_fourth[1]);
        const __m256 next_low = _mm256_unpacklo_ps(every_fourth[2], every_fourth[3]);
        const __m256 next_high = _mm256_unpackhi_ps(every_fourth[2], every_fourth[3]);
        const __m256 done[4] = {_mm256_shuffle_ps(low, next_low, 0x44), _mm256_shuffle_ps(low, next_low, 0xee),
                                _mm256_shuffle_ps(high, next_high, 0x44), _mm256_shuffle_ps(high, next_high, 0xee)};
        for (int n = 0; n < 4; ++n) (half == 0 ? columns[n].low : columns[n].high) = done[n];
    }
#else
    for (int column = 0; column < 4; ++column) {
        float buffer[LANES];
        for (int row = 0; row < LANES; ++row) buffer[row] = rows[row][left + column];
        columns[column] = load(buffer);
    }
#endif
}

}  // namespace kvasir
