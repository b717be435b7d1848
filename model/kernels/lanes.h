// Sixteen floats as one value, on every level. Sums over lanes have one order on all of them.
#pragma once

#include <cstdint>
#include <cstring>

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

inline bf16 to_bf16(float x) {  // to nearest, ties to even; what is no number stays none
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
inline Lanes load(const float* from, int count) {  // zeros behind count
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)};
}
inline Lanes load(const bf16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* to, Lanes x) { _mm512_storeu_ps(to, x.v); }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
// Lanes from first up to end keep x, the others get y. 0 <= first <= end <= 16.
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

struct Lanes {
    float v[LANES];
};

template <typename Work>
inline Lanes each(const Work& work) {
    Lanes result;
    for (int lane = 0; lane < LANES; ++lane) result.v[lane] = work(lane);
    return result;
}

inline Lanes splat(float x) { return each([&](int) { return x; }); }
inline Lanes load(const float* from) { return each([&](int lane) { return from[lane]; }); }
inline Lanes load(const float* from, int count) { return each([&](int lane) { return lane < count ? from[lane] : 0.f; }); }
inline Lanes load(const bf16* from) { return each([&](int lane) { return to_float(from[lane]); }); }
inline void store(float* to, Lanes x) { std::memcpy(to, x.v, sizeof x.v); }
inline Lanes add(Lanes a, Lanes b) { return each([&](int lane) { return a.v[lane] + b.v[lane]; }); }
inline Lanes sub(Lanes a, Lanes b) { return each([&](int lane) { return a.v[lane] - b.v[lane]; }); }
inline Lanes mul(Lanes a, Lanes b) { return each([&](int lane) { return a.v[lane] * b.v[lane]; }); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return each([&](int lane) { return a.v[lane] * b.v[lane] + c.v[lane]; }); }
inline Lanes max(Lanes a, Lanes b) { return each([&](int lane) { return a.v[lane] > b.v[lane] ? a.v[lane] : b.v[lane]; }); }
inline Lanes select(int first, int end, Lanes x, Lanes y) {
    return each([&](int lane) { return lane >= first && lane < end ? x.v[lane] : y.v[lane]; });
}
inline Lanes round(Lanes x) {  // |x| < 2^22: adding what leaves no room for a fraction
    constexpr float large = 12582912.f;
    return each([&](int lane) { return (x.v[lane] + large) - large; });
}
inline Lanes scale_by_power(Lanes x, Lanes n) {  // -126 <= n <= 127
    return each([&](int lane) {
        const int32_t bits = (static_cast<int32_t>(n.v[lane]) + 127) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof power);
        return x.v[lane] * power;
    });
}

#endif

inline Lanes zeros() { return splat(0.f); }

inline Lanes load(const bf16* from, int count) {
    bf16 buffer[LANES] = {};
    std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(bf16));
    return load(buffer);
}

// Halves onto halves: the same tree on every level.
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

// 2^x for x <= 127, 0 where it would be under 2^-126. The rest after rounding x to n lies within half; its Taylor
// series to the 7th power is closer than float rounds.
inline Lanes exp2(Lanes x) {
    const Lanes bounded = max(x, splat(-126.f));
    const Lanes n = round(bounded);
    const Lanes rest = sub(bounded, n);
    Lanes power = splat(1.52527338e-5f);
    for (float coefficient : {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f,
                              6.93147181e-1f, 1.f}) {
        power = fma(power, rest, splat(coefficient));
    }
    return scale_by_power(power, n);
}

// Sixteen rows of sixteen become columns.
inline void transpose(Lanes (&rows)[LANES]) {
#if defined(__AVX512F__)
    __m512 a[LANES], b[LANES];
    for (int row = 0; row < LANES; row += 2) {
        a[row] = _mm512_unpacklo_ps(rows[row].v, rows[row + 1].v);
        a[row + 1] = _mm512_unpackhi_ps(rows[row].v, rows[row + 1].v);
    }
    auto pairs = [](__m512 x) { return _mm512_castps_pd(x); };
    for (int row = 0; row < LANES; row += 4) {
        for (int half = 0; half < 2; ++half) {
            const __m512d upper = pairs(a[row + half]), lower = pairs(a[row + half + 2]);
            b[row + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower));
            b[row + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower));
        }
    }
    for (int column = 0; column < 4; ++column) {
        const __m512 low = _mm512_shuffle_f32x4(b[column], b[column + 4], 0x88);
        const __m512 high = _mm512_shuffle_f32x4(b[column], b[column + 4], 0xdd);
        const __m512 low_next = _mm512_shuffle_f32x4(b[column + 8], b[column + 12], 0x88);
        const __m512 high_next = _mm512_shuffle_f32x4(b[column + 8], b[column + 12], 0xdd);
        rows[column].v = _mm512_shuffle_f32x4(low, low_next, 0x88);
        rows[column + 8].v = _mm512_shuffle_f32x4(low, low_next, 0xdd);
        rows[column + 4].v = _mm512_shuffle_f32x4(high, high_next, 0x88);
        rows[column + 12].v = _mm512_shuffle_f32x4(high, high_next, 0xdd);
    }
#else
    float from[LANES][LANES], to[LANES][LANES];
    for (int row = 0; row < LANES; ++row) store(from[row], rows[row]);
#if defined(__AVX2__)
    for (int top = 0; top < LANES; top += 8) {
        for (int left = 0; left < LANES; left += 8) {
            __m256 a[8], b[8];
            for (int row = 0; row < 8; row += 2) {
                const __m256 one = _mm256_loadu_ps(&from[top + row][left]);
                const __m256 two = _mm256_loadu_ps(&from[top + row + 1][left]);
                a[row] = _mm256_unpacklo_ps(one, two);
                a[row + 1] = _mm256_unpackhi_ps(one, two);
            }
            for (int row = 0; row < 8; row += 4) {
                for (int half = 0; half < 2; ++half) {
                    b[row + 2 * half] = _mm256_shuffle_ps(a[row + half], a[row + half + 2], 0x44);
                    b[row + 2 * half + 1] = _mm256_shuffle_ps(a[row + half], a[row + half + 2], 0xee);
                }
            }
            for (int column = 0; column < 4; ++column) {
                _mm256_storeu_ps(&to[left + column][top], _mm256_permute2f128_ps(b[column], b[column + 4], 0x20));
                _mm256_storeu_ps(&to[left + column + 4][top], _mm256_permute2f128_ps(b[column], b[column + 4], 0x31));
            }
        }
    }
#else
    for (int row = 0; row < LANES; ++row) {
        for (int column = 0; column < LANES; ++column) to[column][row] = from[row][column];
    }
#endif
    for (int row = 0; row < LANES; ++row) rows[row] = load(to[row]);
#endif
}

}  // namespace kvasir
