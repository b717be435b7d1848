// Operations on single rows: norms, rotary embedding, activations, quantization to int8.
#pragma once

#include <cmath>
#include <limits>

#include "kernel.h"
#include "lanes.h"

namespace kvasir {

constexpr int64_t PAD = 64;  // row strides are rounded up to a multiple of PAD

inline int64_t padded(int64_t size) { return (size + PAD - 1) / PAD * PAD; }

inline Lanes divide(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return {_mm512_div_ps(a.v, b.v)};
#elif defined(__AVX2__)
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
#else
    return {a.v / b.v};
#endif
}

inline void store(bf16* to, Lanes x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
#elif defined(__AVX512F__)
    const __m512i bits = _mm512_castps_si512(x.v), half = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(half, _mm512_set1_epi32(0x40));
    const __m512i rounded = _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(sum, 16), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
#else
    float buffer[LANES];
    store(buffer, x);
    for (int lane = 0; lane < LANES; ++lane) to[lane] = to_bf16(buffer[lane]);
#endif
}

inline Lanes least(Lanes a, Lanes b) { return sub(zeros(), max(sub(zeros(), a), sub(zeros(), b))); }

// 1 / (1 + e^-x). The exponent is clamped to 126: for x below about -87 the result is about 2^-126.
inline Lanes sigmoid(Lanes x) {
    const Lanes power = exp2(least(mul(x, splat(-1.44269504f)), splat(126.f)));
    return divide(splat(1.f), add(splat(1.f), power));
}

enum class Activation : int64_t { gelu = 0, gelu_exact = 1, relu = 2, silu = 3 };

inline Lanes activate(Activation activation, Lanes x) {
    switch (activation) {
        case Activation::silu: return mul(x, sigmoid(x));
        case Activation::relu: return max(zeros(), x);  // NaN stays NaN only in this operand order
        case Activation::gelu: {  // x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            const Lanes cubic = mul(mul(x, x), mul(x, splat(0.044715f)));
            return mul(x, sigmoid(mul(splat(1.59576912f), add(x, cubic))));
        }
        case Activation::gelu_exact: break;
    }
    float buffer[LANES];
    store(buffer, x);
    for (float& value : buffer) value = 0.5f * value * (1.f + std::erf(value * 0.70710678f));
    return load(buffer);
}

enum class Norm : int64_t { rms = 0, layer = 1 };

// Returns the sum of work(v) over a row of `size` floats. The last values are passed one by one, in the first lane.
template <typename Work>
inline float sum_over(const float* x, int64_t size, const Work& work) {
    Lanes sums = zeros();
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) sums = add(sums, work(load(x + at)));
    float total = sum(sums);
    for (; at < size; ++at) {
        float buffer[LANES] = {x[at]};
        float result[LANES];
        store(result, work(load(buffer)));
        total += result[0];
    }
    return total;
}

// out = norm(x) * weight + bias. `out` may be x. Up to 15 floats after the end of x may be read.
inline void normalize(Norm norm, const float* x, int64_t size, const float* weight, const float* bias, float eps,
                      float* out) {
    float mean = 0.f;
    if (norm == Norm::layer) mean = sum_over(x, size, [](Lanes v) { return v; }) / static_cast<float>(size);
    const Lanes shift = splat(mean);
    // sum_over passes the last values one by one, in the first lane, and ignores the other lanes. Subtracting the mean
    // from zero padding therefore does no harm.
    const float squares = sum_over(x, size, [&](Lanes v) { return mul(sub(v, shift), sub(v, shift)); });
    const Lanes factor = splat(1.f / std::sqrt(squares / static_cast<float>(size) + eps));
    for (int64_t at = 0; at < size; at += LANES) {
        const int count = size - at < LANES ? static_cast<int>(size - at) : LANES;
        Lanes y = mul(mul(sub(load(x + at), shift), factor), load(weight + at, count));
        if (bias != nullptr) y = add(y, load(bias + at, count));
        if (count == LANES) {
            store(out + at, y);
        } else {
            float buffer[LANES];
            store(buffer, y);
            for (int lane = 0; lane < count; ++lane) out[at + lane] = buffer[lane];
        }
    }
}

inline uint8_t shifted(float rounded) { return static_cast<uint8_t>(static_cast<int>(rounded) + 128); }

// Quantizes a row to int8 with 128 added and returns its scale: x = scale (out - 128). The scale is NaN if a value is
// not finite, because the integers cannot show it.
template <typename Number>
inline float to_8_bits(const Number* x, int64_t size, uint8_t* out) {
    Lanes most = zeros(), odd = zeros();  // odd: 0 if all numbers so far are finite, else NaN
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) {
        const Lanes some = load(x + at);
        most = max(most, max(some, sub(zeros(), some)));
        odd = fma(some, zeros(), odd);
    }
    float top = largest(most), last = 0.f;
    for (; at < size; ++at) {
        top = std::fmax(top, std::fabs(to_float(x[at])));
        last += to_float(x[at]) * 0.f;
    }
    const float scale = std::fmax(top, 1e-30f) / 127.f + sum(odd) + last;
    for (at = 0; at + LANES <= size; at += LANES) {
        const Lanes quotient = divide(load(x + at), splat(scale));
#if defined(__AVX512F__)
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(quotient.v));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
#else
        float rounded[LANES];
        store(rounded, round(quotient));
        for (int lane = 0; lane < LANES; ++lane) out[at + lane] = shifted(rounded[lane]);
#endif
    }
    for (; at < size; ++at) out[at] = shifted(std::nearbyint(to_float(x[at]) / scale));
    return scale;
}

// Applies the rotary embedding to the first 2 * half numbers of a head: rotates the pair (i, i + half) by angle i.
inline void rotate(float* head, int64_t half, const float* cosines, const float* sines) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

template <typename Number>
inline void copy(const Number* from, int64_t size, Number* to) {
    std::memcpy(to, from, static_cast<size_t>(size) * sizeof(Number));
}

inline void copy(const float* from, int64_t size, bf16* to) {
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) store(to + at, load(from + at));
    for (; at < size; ++at) to[at] = to_bf16(from[at]);
}

inline void copy(const bf16* from, int64_t size, float* to) {
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) store(to + at, load(from + at));
    for (; at < size; ++at) to[at] = to_float(from[at]);
}

// Returns whether all numbers and their sum are finite. Rows with an overflowing sum are too large for any norm.
inline bool is_finite(const float* x, int64_t size) {
    return std::isfinite(sum_over(x, size, [](Lanes v) { return v; }));
}

// Returns the index of the first maximum of a row; -1 if any number of the row is NaN or infinite.
inline int64_t most_likely(const float* x, int64_t size) {
    constexpr int64_t BLOCK = 16 * LANES;
    Lanes odd = zeros();  // 0 if all numbers so far are finite, else NaN
    float most = -std::numeric_limits<float>::infinity();
    int64_t block = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        const int64_t end = start + BLOCK < size ? start + BLOCK : size;
        Lanes lanes = splat(most);
        int64_t at = start;
        for (; at + LANES <= end; at += LANES) {
            const Lanes some = load(x + at);
            lanes = max(lanes, some);
            odd = fma(some, zeros(), odd);
        }
        float found = largest(lanes);
        for (; at < end; ++at) {
            found = x[at] > found ? x[at] : found;
            odd = fma(splat(x[at]), zeros(), odd);
        }
        if (found > most) most = found, block = start;
    }
    if (sum(odd) != 0.f) return -1;
    while (x[block] != most) ++block;
    return block;
}

}  // namespace kvasir
