// Sixteen floats as one value (`Lanes`), conversions to bfloat16 and float16, and transposition of rows.
// Sums over lanes have the same order on every CPU level.
#pragma once

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "the kernels need AVX2, FMA and F16C; see LEVELS in build.py"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace kvasir {

constexpr int LANES = 16;

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

// float16: IEEE 754 binary16, only for the KV-cache.
struct half {
    uint16_t bits;
};

constexpr float LARGEST_HALF = 65504.f;

inline float to_float(half x) { return _cvtsh_ss(x.bits); }

inline bf16 to_bf16(float x) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
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
inline Lanes load(const half* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
// Returns the first numbers of sixteen pairs, or the second numbers.
inline Lanes load_of_pairs(const bf16* from, bool is_second) {
    const __m512i pairs = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(is_second ? _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                                          : _mm512_slli_epi32(pairs, 16))};
}
inline Lanes load(const int8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
inline void store(float* to, Lanes x) { _mm512_storeu_ps(to, x.v); }
inline void store_rounded(half* to, Lanes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes divide(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// If one operand is NaN, max and min return the second operand.
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
// Returns x in the lanes from first to end - 1, and y in the other lanes. 0 <= first <= end <= 16.
inline Lanes select(int first, int end, Lanes x, Lanes y) {
    const auto mask = static_cast<__mmask16>(((1u << end) - 1) & ~((1u << first) - 1));
    return {_mm512_mask_blend_ps(mask, y.v, x.v)};
}
// Rounds to integers, ties to even. Integers must be from -128 to 127; NaN becomes 0.
inline void store(int8_t* to, Lanes x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline Lanes round(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes scale_by_power(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#else

struct Lanes {
    __m256 low, high;
};

inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline __m256 widen(const bf16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes load(const bf16* from) { return {widen(from), widen(from + 8)}; }
inline __m256 widen(const half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Lanes load(const half* from) { return {widen(from), widen(from + 8)}; }
inline __m256 widen(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Lanes load(const int8_t* from) { return {widen(from), widen(from + 8)}; }
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
inline void store_rounded(half* to, Lanes x) {
    auto* halves = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes divide(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
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
inline void store(int8_t* to, Lanes x) {  // saturation turns NaN into -128, which the mask turns into 0
    const auto numbers = [](__m256 part) {
        const __m256i is_number = _mm256_castps_si256(_mm256_cmp_ps(part, part, _CMP_ORD_Q));
        return _mm256_and_si256(_mm256_cvtps_epi32(part), is_number);
    };
    const __m256i words = _mm256_packs_epi32(numbers(x.low), numbers(x.high));  // 0-3 and 8-11, 4-7 and 12-15
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
inline __m256 scale_by_power(__m256 x, __m256 n) {  // -126 <= n <= 127
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline Lanes scale_by_power(Lanes x, Lanes n) { return {scale_by_power(x.low, n.low), scale_by_power(x.high, n.high)}; }

#endif

inline Lanes zeros() { return splat(0.f); }

// Loads `count` numbers; the other lanes are zero.
template <typename Number>
inline Lanes load(const Number* from, int count) {
    Number buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(Number));
    return load(buffer);
}

// Rounds to nearest, ties to even. Infinity and values beyond the largest half become the largest half. NaN stays NaN.
inline void store(half* to, Lanes x) {
    store_rounded(to, min(splat(LARGEST_HALF), max(splat(-LARGEST_HALF), x)));
}

inline void store(bf16* to, Lanes x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
#else
    float buffer[LANES];
    store(buffer, x);
    for (int lane = 0; lane < LANES; ++lane) to[lane] = to_bf16(buffer[lane]);
#endif
}

// Rounds to integers and stores each plus 128. Integers must be from -128 to 127.
inline void store_shifted(uint8_t* to, Lanes x) {
    store(reinterpret_cast<int8_t*>(to), x);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(to));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
}

// Loads sixteen numbers, or `left` numbers if there are fewer; the other lanes are zero.
template <typename Number>
inline Lanes load_up_to(const Number* from, int64_t left) {
    return left >= LANES ? load(from) : load(from, static_cast<int>(left));
}

// Stores sixteen numbers, or `left` numbers if there are fewer.
template <typename Number>
inline void store_up_to(Number* to, Lanes x, int64_t left) {
    if (left >= LANES) return store(to, x);
    Number buffer[LANES];
    store(buffer, x);
    std::memcpy(to, buffer, static_cast<size_t>(left) * sizeof(Number));
}

// Converts `size` numbers from one type to another.
template <typename From, typename To>
inline void convert(const From* from, int64_t size, To* to) {
    for (int64_t at = 0; at < size; at += LANES) store_up_to(to + at, load_up_to(from + at, size - at), size - at);
}

template <typename Number>
inline void convert(const Number* from, int64_t size, Number* to) {
    std::memcpy(to, from, static_cast<size_t>(size) * sizeof(Number));
}

// Reductions fold the upper half onto the lower half: the same tree on every level.
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

// 2^x for x <= 127; x below -126 is clamped to -126. x is n + rest with an integer n and |rest| <= 0.5. The polynomial
// for 2^rest has the smallest relative error, 9.1e-8, of those of degree 5 that are 1 at 0 (Remez 1934).
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

// tanh x = e / (e + 2) with e = exp(2 x) - 1, which is 2^n (2^rest - 1) + (2^n - 1) for 2 x log2(e) = n + rest. This has
// no cancellation near 0: the relative error is at most 2.4e-7. Beyond 12 the result is 1 in float32. The polynomial for
// (2^rest - 1) / rest has the smallest relative error, 1.1e-8, of those of degree 5.
inline Lanes tanh(Lanes x) {
    const Lanes bounded = min(splat(12.f), max(splat(-12.f), x));  // NaN stays NaN
    const Lanes exponent = mul(bounded, splat(2.88539008f));
    const Lanes n = round(exponent), rest = sub(exponent, n);
    Lanes power = splat(1.54035128e-4f);
    for (float coefficient : {1.33907356e-3f, 9.61823749e-3f, 5.55035743e-2f, 2.40226498e-1f, 6.93147188e-1f}) {
        power = fma(power, rest, splat(coefficient));
    }
    const Lanes two_to_n = scale_by_power(splat(1.f), n);
    const Lanes less_one = fma(two_to_n, mul(power, rest), sub(two_to_n, splat(1.f)));
    return divide(less_one, add(less_one, splat(2.f)));
}

// cap * tanh(factor * x): for a factor of 1 / cap, about x for small x, and never more than cap.
inline Lanes soft_cap(Lanes x, float factor, float cap) { return mul(splat(cap), tanh(mul(x, splat(factor)))); }

inline __m128 load_four(const float* from) { return _mm_loadu_ps(from); }
inline __m128 load_four(const half* from) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline __m128 load_four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
}
inline __m128 load_four(const bf16* from) {
    const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm_castsi128_ps(_mm_slli_epi32(wide, 16));
}

// Returns four columns, starting at `left`, of sixteen rows at any addresses.
template <typename Number>
inline void transpose(const Number* const (&rows)[LANES], int left, Lanes (&columns)[4]) {
#if defined(__AVX512F__)
    __m512 every_fourth[4];  // four floats of each of the rows n, n + 4, n + 8, n + 12
    for (int n = 0; n < 4; ++n) {
        __m512 four = _mm512_castps128_ps512(load_four(rows[n] + left));
        four = _mm512_insertf32x4(four, load_four(rows[n + 4] + left), 1);
        four = _mm512_insertf32x4(four, load_four(rows[n + 8] + left), 2);
        every_fourth[n] = _mm512_insertf32x4(four, load_four(rows[n + 12] + left), 3);
    }
    const __m512 low = _mm512_unpacklo_ps(every_fourth[0], every_fourth[1]);
    const __m512 high = _mm512_unpackhi_ps(every_fourth[0], every_fourth[1]);
    const __m512 next_low = _mm512_unpacklo_ps(every_fourth[2], every_fourth[3]);
    const __m512 next_high = _mm512_unpackhi_ps(every_fourth[2], every_fourth[3]);
    columns[0].v = _mm512_shuffle_ps(low, next_low, 0x44);
    columns[1].v = _mm512_shuffle_ps(low, next_low, 0xee);
    columns[2].v = _mm512_shuffle_ps(high, next_high, 0x44);
    columns[3].v = _mm512_shuffle_ps(high, next_high, 0xee);
#else
    for (int part = 0; part < 2; ++part) {
        __m256 every_fourth[4];
        for (int n = 0; n < 4; ++n) {
            const Number* const* of = rows + 8 * part + n;
            every_fourth[n] = _mm256_insertf128_ps(_mm256_castps128_ps256(load_four(of[0] + left)),
                                                   load_four(of[4] + left), 1);
        }
        const __m256 low = _mm256_unpacklo_ps(every_fourth[0], every_fourth[1]);
        const __m256 high = _mm256_unpackhi_ps(every_fourth[0], every_fourth[1]);
        const __m256 next_low = _mm256_unpacklo_ps(every_fourth[2], every_fourth[3]);
        const __m256 next_high = _mm256_unpackhi_ps(every_fourth[2], every_fourth[3]);
        const __m256 done[4] = {_mm256_shuffle_ps(low, next_low, 0x44), _mm256_shuffle_ps(low, next_low, 0xee),
                                _mm256_shuffle_ps(high, next_high, 0x44), _mm256_shuffle_ps(high, next_high, 0xee)};
        for (int n = 0; n < 4; ++n) (part == 0 ? columns[n].low : columns[n].high) = done[n];
    }
#endif
}

// Widens one byte of every lane: the signed number in bits 8 * byte to 8 * byte + 7.
#if defined(__AVX512F__)
inline Lanes widen_byte(Lanes x, int byte) {
    const __m512i upper = _mm512_slli_epi32(_mm512_castps_si512(x.v), 24 - 8 * byte);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(upper, 24))};
}
#else
inline __m256 widen_byte(__m256 x, int byte) {
    const __m256i upper = _mm256_slli_epi32(_mm256_castps_si256(x), 24 - 8 * byte);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(upper, 24));
}
inline Lanes widen_byte(Lanes x, int byte) { return {widen_byte(x.low, byte), widen_byte(x.high, byte)}; }
#endif

// Returns sixteen columns of int8 rows. Moves four numbers together and widens them afterwards.
inline void transpose(const int8_t* const (&rows)[LANES], int left, Lanes (&columns)[LANES]) {
    const float* fours[LANES];
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row) fours[row] = reinterpret_cast<const float*>(rows[row] + left);
    Lanes moved[4];
    transpose(fours, 0, moved);
#pragma GCC unroll 16
    for (int column = 0; column < LANES; ++column) columns[column] = widen_byte(moved[column / 4], column % 4);
}

// Calls work with the number of rows, at most MAX, as a std::integral_constant.
template <int MAX, typename Work>
void with_rows(int rows, const Work& work) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, work);
    }
    work(std::integral_constant<int, MAX>{});
}

}  // namespace kvasir
