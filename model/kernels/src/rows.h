// Operations on single rows: norms, rotary embedding, activations, quantization to int8.
#pragma once

#include <cmath>
#include <limits>

#include "bytes.h"

namespace kvasir {

constexpr int64_t PAD = 64;  // row strides are rounded up to a multiple of PAD

inline int64_t padded(int64_t size) { return (size + PAD - 1) / PAD * PAD; }

// 1 / (1 + e^-x). The exponent is clamped to 126: for x below about -87 the result is about 2^-126.
inline Lanes sigmoid(Lanes x) {
    const Lanes power = exp2(min(splat(126.f), mul(x, splat(-1.44269504f))));
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

// Returns the sum of work(v) over a row of `size` floats.
template <typename Work>
inline float sum_over(const float* x, int64_t size, const Work& work) {
    Lanes sums = zeros();
    for (int64_t at = 0; at < size; at += LANES) {
        const Lanes terms = work(load_up_to(x + at, size - at));
        const bool is_whole = size - at >= LANES;
        sums = add(sums, is_whole ? terms : select(0, static_cast<int>(size - at), terms, zeros()));
    }
    return sum(sums);
}

// out = norm(x) * weight + bias. `out` may be x.
inline void normalize(Norm norm, const float* x, int64_t size, const float* weight, const float* bias, float eps,
                      float* out) {
    float mean = 0.f;
    if (norm == Norm::layer) mean = sum_over(x, size, [](Lanes v) { return v; }) / static_cast<float>(size);
    const Lanes shift = splat(mean);
    const float squares = sum_over(x, size, [&](Lanes v) { return mul(sub(v, shift), sub(v, shift)); });
    const Lanes factor = splat(1.f / std::sqrt(squares / static_cast<float>(size) + eps));
    for (int64_t at = 0; at < size; at += LANES) {
        const int64_t left = size - at;
        Lanes y = mul(mul(sub(load_up_to(x + at, left), shift), factor), load_up_to(weight + at, left));
        if (bias != nullptr) y = add(y, load_up_to(bias + at, left));
        store_up_to(out + at, y, left);
    }
}

// Returns the scale of a row in int8: its largest absolute value / 127. The scale is NaN if a number is not finite.
template <typename Number>
inline float int8_scale(const Number* x, int64_t size) {
    Lanes most = zeros(), not_finite = zeros();  // not_finite: 0 if all numbers so far are finite, else NaN
    for (int64_t at = 0; at < size; at += LANES) {
        const Lanes some = load_up_to(x + at, size - at);
        most = max(most, max(some, sub(zeros(), some)));
        not_finite = fma(some, zeros(), not_finite);
    }
    return std::fmax(largest(most), 1e-30f) / 127.f + sum(not_finite);
}

// Quantizes a row to int8 with 128 added and returns its scale: x = scale (out - 128). `out` must have room for
// `padded(size)` bytes.
template <typename Number>
inline float quantize(const Number* x, int64_t size, uint8_t* out) {
    const float scale = int8_scale(x, size);
    for (int64_t at = 0; at < size; at += LANES) {
        store_shifted(out + at, divide(load_up_to(x + at, size - at), splat(scale)));
    }
    return scale;
}

constexpr int64_t GROUP_SIZE = 32;

// Quantized inputs of a group. start: their sum times -`added`, the number that is added to weight codes.
struct InputGroup {
    int8_t codes[GROUP_SIZE];
    int32_t start;
    float sum;
};

inline int32_t sum_of(const int8_t* codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t at = 0; at < count; ++at) sum += codes[at];
    return sum;
}

// Splits quantized inputs into groups. The number of inputs is a multiple of GROUP_SIZE.
inline void split(const int8_t* codes, int64_t size, InputGroup* out) {
    constexpr int32_t added = HAS_BYTE_DOT ? 128 : 0;  // without VNNI, `dot_shifted` subtracts 128
    for (const int8_t* end = codes + size; codes < end; codes += GROUP_SIZE, ++out) {
        const int32_t sum = sum_of(codes, GROUP_SIZE);
        std::memcpy(out->codes, codes, GROUP_SIZE);
        out->start = -added * sum;
        out->sum = static_cast<float>(sum);
    }
}

// Quantized inputs of two groups. starts: sums of the products of -8, which is added to codes of 4 bits, and a group's
// inputs; 2^15 is added to the second. sums: of the inputs of the second and of the first group.
struct InputPair {
    int8_t codes[2][GROUP_SIZE];
    int32_t starts[2];
    int16_t sums[2];
};

// Splits quantized inputs into pairs of groups. The number of inputs is a multiple of 2 * GROUP_SIZE.
inline void split(const int8_t* codes, int64_t size, InputPair* out) {
    for (const int8_t* end = codes + size; codes < end; ++out) {
        for (int64_t group = 0; group < 2; ++group, codes += GROUP_SIZE) {
            const int32_t sum = sum_of(codes, GROUP_SIZE);
            std::memcpy(out->codes[group], codes, GROUP_SIZE);
            out->starts[group] = -8 * sum + (group == 0 ? 0 : 1 << 15);
            out->sums[1 - group] = static_cast<int16_t>(sum);
        }
    }
}

// Returns the sums that `dot_codes` begins with if `added` is added to its codes: the inputs' products with -added.
inline int32_t start_of(const int8_t* codes, int64_t count, int32_t added) {
    int32_t sums[2] = {0, 0};
    for (int64_t at = 0; at < count; ++at) sums[at / 2 % 2] -= added * codes[at];
    return HAS_BYTE_DOT ? sums[0] + sums[1] : sums[1] * (1 << 16) + (sums[0] & 0xffff);
}

// Quantized inputs of a block of 256. starts: `start_of` groups of 16, with codes of 6 bits that have 32 added. sums: of 32
// inputs.
struct InputBlock {
    static constexpr int64_t INPUTS = 256, GROUPS = 16;
    int8_t codes[INPUTS];
    int32_t starts[GROUPS];
    float sums[GROUPS / 2];
};
constexpr int64_t LARGEST_INPUT_BYTES = sizeof(InputBlock) / 8;  // of 32 quantized inputs, of all kinds of matrices

// Splits quantized inputs into blocks. The number of inputs is a multiple of 256.
inline void split(const int8_t* codes, int64_t size, InputBlock* out) {
    for (const int8_t* end = codes + size; codes < end; ++out) {
        std::memcpy(out->codes, codes, InputBlock::INPUTS);
        for (int64_t group = 0; group < InputBlock::GROUPS; ++group, codes += 16) {
            out->starts[group] = start_of(codes, 16, 32);
            if (group % 2 == 0) out->sums[group / 2] = static_cast<float>(sum_of(codes, GROUP_SIZE));
        }
    }
}

// Quantizes a row to int8 and returns its scale: x = scale * out.
template <typename Number>
inline float quantize(const Number* x, int64_t size, int8_t* out) {
    const float scale = int8_scale(x, size);
    for (int64_t at = 0; at < size; at += LANES) {
        store_up_to(out + at, divide(load_up_to(x + at, size - at), splat(scale)), size - at);
    }
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

// Returns whether all numbers and their sum are finite. Rows with an overflowing sum are too large for any norm.
inline bool is_finite(const float* x, int64_t size) {
    return std::isfinite(sum_over(x, size, [](Lanes v) { return v; }));
}

// Returns the index of the first maximum of a row; -1 if any number of the row is NaN or infinite.
inline int64_t most_likely(const float* x, int64_t size) {
    constexpr int64_t BLOCK = 16 * LANES;
    Lanes not_finite = zeros();  // 0 if all numbers so far are finite, else NaN
    float most = -std::numeric_limits<float>::infinity();
    int64_t block_of_most = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        Lanes block_most = splat(most);
        for (int64_t at = start; at < size && at < start + BLOCK; at += LANES) {
            const Lanes some = load_up_to(x + at, size - at);
            const bool is_whole = size - at >= LANES;
            not_finite = fma(some, zeros(), not_finite);
            block_most = max(block_most, is_whole ? some : select(0, static_cast<int>(size - at), some, block_most));
        }
        if (const float found = largest(block_most); found > most) most = found, block_of_most = start;
    }
    if (sum(not_finite) != 0.f) return -1;
    while (x[block_of_most] != most) ++block_of_most;
    return block_of_most;
}

}  // namespace kvasir
