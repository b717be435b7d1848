// Products with weights in groups of 32 inputs: w = scale * code + offset, codes of 8 bits, or of 4 with offsets.
//
// A strip of STRIP outputs holds, for each group of inputs: the codes of each block of LANES outputs, then a float16
// scale for each output, then float16 offsets if the matrix has any. Codes are unsigned: 8 or 128 is added. A register
// of 64 bytes has four inputs of each output; of 4-bit codes, the low halves of the bytes are four inputs and the high
// halves the next four. Scales and offsets are divided by a power of two for each output, which is Matrix::scale.
#pragma once

#include "kernel.h"
#include "rows.h"

namespace kvasir {

constexpr int STRIP_BLOCKS = 2, STRIP = STRIP_BLOCKS * LANES;

#if defined(__AVX512F__)
constexpr int GROUPED_ROWS = 6, GROUPED_BLOCKS = 2;  // integer and float sums take 24 of 32 registers

struct Codes {  // four inputs of each of LANES outputs
    __m512i v;
};
struct Counts {  // an integer sum for each of LANES outputs
    __v16si v;
};

inline Codes load_codes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
inline Codes low_halves(Codes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Codes high_halves(Codes x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline Codes spread_codes(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return {_mm512_set1_epi32(word)};
}
inline Counts splat(int32_t x) { return {(__v16si)_mm512_set1_epi32(x)}; }
inline Lanes floats(Counts x) { return {_mm512_cvtepi32_ps((__m512i)x.v)}; }
#if defined(__AVX512VNNI__)
constexpr bool HAS_BYTE_DOT = true;
template <int BITS>
inline Counts dot(Counts sums, Codes weights, Codes inputs) {
    return {(__v16si)_mm512_dpbusd_epi32((__m512i)sums.v, weights.v, inputs.v)};
}
#else
constexpr bool HAS_BYTE_DOT = false;
template <int BITS>
inline Counts dot(Counts sums, Codes weights, Codes inputs) {
    if constexpr (BITS == 8) {  // move the sign of the weights to the inputs: pairs of products then fit in 16 bits
        const __m512i codes = _mm512_xor_si512(weights.v, _mm512_set1_epi8(-128));
        inputs.v = _mm512_mask_sub_epi8(inputs.v, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), inputs.v);
        weights.v = _mm512_abs_epi8(codes);
    }
    const __m512i pairs = _mm512_maddubs_epi16(weights.v, inputs.v);
    return {(__v16si)_mm512_add_epi32((__m512i)sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif

#else
constexpr int GROUPED_ROWS = 3, GROUPED_BLOCKS = 1;
constexpr bool HAS_BYTE_DOT = false;

struct Codes {
    __m256i low, high;
};
using Counts = Codes;

inline __m256i load_half(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Codes load_codes(const uint8_t* from) { return {load_half(from), load_half(from + 32)}; }
inline Codes low_halves(Codes x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
inline Codes high_halves(Codes x) { return low_halves({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }
inline Counts splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Codes spread_codes(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return splat(word);
}
inline Lanes floats(Counts x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
template <int BITS>
inline __m256i dot_half(__m256i sums, __m256i weights, __m256i inputs) {
    if constexpr (BITS == 8) {  // move the sign of the weights to the inputs: pairs of products then fit in 16 bits
        const __m256i codes = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        inputs = _mm256_sign_epi8(inputs, codes);
        weights = _mm256_abs_epi8(codes);
    }
    const __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int BITS>
inline Counts dot(Counts sums, Codes weights, Codes inputs) {
    return {dot_half<BITS>(sums.low, weights.low, inputs.low), dot_half<BITS>(sums.high, weights.high, inputs.high)};
}
#endif

// Weights of 4 or 8 bits. A block of codes takes BITS registers of 64 bytes.
template <int NUM_BITS, bool HAS_OFFSETS>
struct Grouped {
    static constexpr int BITS = NUM_BITS, NUM_SPREADS = HAS_OFFSETS ? 2 : 1;
    static constexpr bool HAS_OFFSET = HAS_OFFSETS;
    static constexpr int64_t SCALES = STRIP_BLOCKS * BITS * 64;                         // position of a group's scales
    static constexpr int64_t BYTES = SCALES + NUM_SPREADS * STRIP * sizeof(uint16_t);  // of a group
    // Number that is added to weight codes, as far as `dot` does not subtract it.
    static constexpr int32_t ADDED = BITS == 4 ? 8 : HAS_BYTE_DOT ? 128 : 0;

    static Lanes scale(const uint8_t* group, int block) {
        return load(reinterpret_cast<const half*>(group + SCALES) + block * LANES);
    }
    static Lanes offset(const uint8_t* group, int block) {
        return load(reinterpret_cast<const half*>(group + SCALES) + STRIP + block * LANES);
    }
};

// Calls work with an object of the `Grouped` type that a matrix of these numbers has.
template <typename Work>
void with_grouped(Numbers numbers, const Work& work) {
    switch (numbers) {
        case Numbers::grouped4_offset: return work(Grouped<4, true>{});
        case Numbers::grouped8: return work(Grouped<8, false>{});
        default: return work(Grouped<8, true>{});
    }
}

// Returns the address of the weights of an output, which must be the first of a strip.
template <typename Kind>
inline const uint8_t* strip_of(const Matrix& matrix, int64_t output) {
    const int64_t groups = (matrix.inputs + GROUP_SIZE - 1) / GROUP_SIZE;
    return static_cast<const uint8_t*>(matrix.weight) + output / STRIP * groups * Kind::BYTES;
}

// Prefetch plan of a tile: `lines` lines of 64 bytes of each group of the next strip. lines 0: the tile prefetches its
// own strip, and near its end the first groups of the next strip.
struct StripFetch {
    const uint8_t* next;
    int64_t first, lines;
};

// Multiplies ROWS rows by BLOCKS blocks of a strip, from block `first` on.
template <typename Kind, int ROWS, int BLOCKS>
inline void sum_groups(const uint8_t* strip, int first, int64_t groups, const InputGroup* x, int64_t stride,
                       StripFetch fetch, Lanes (&sums)[ROWS][STRIP_BLOCKS]) {
    constexpr int64_t AHEAD = 12288 / Kind::BYTES;  // prefetch distance, in groups: covers the latency of memory
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; ++b) sums[r][first + b] = zeros();
    }
    for (int64_t group = 0; group < groups; ++group, strip += Kind::BYTES, ++x) {
        if (fetch.lines > 0) {
            const uint8_t* from = fetch.next + group * Kind::BYTES + fetch.first * 64;
            for (int64_t line = 0; line < fetch.lines; ++line) __builtin_prefetch(from + line * 64, 0, 2);
        } else {
            const int64_t left = groups - group;
            const uint8_t* from = AHEAD < left ? strip + AHEAD * Kind::BYTES : fetch.next + (AHEAD - left) * Kind::BYTES;
#pragma GCC unroll 20
            for (int64_t at = 0; at < Kind::BYTES; at += 64) __builtin_prefetch(from + at, 0, 2);
        }
        Counts counts[ROWS][BLOCKS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) counts[r][b] = splat(x[r * stride].start);
        }
#pragma GCC unroll 8
        for (int four = 0; four < 8; ++four) {
            Codes weights[BLOCKS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) {
                const uint8_t* block = strip + (first + b) * Kind::BITS * 64;
                if constexpr (Kind::BITS == 8) {
                    weights[b] = load_codes(block + four * 64);
                } else {
                    const Codes both = load_codes(block + four / 2 * 64);
                    weights[b] = four % 2 == 0 ? low_halves(both) : high_halves(both);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Codes inputs = spread_codes(x[r * stride].codes + 4 * four);
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; ++b) {
                    counts[r][b] = dot<Kind::BITS>(counts[r][b], weights[b], inputs);
                }
            }
        }
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; ++b) {
            const Lanes scale = Kind::scale(strip, first + b);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r][first + b] = fma(floats(counts[r][b]), scale, sums[r][first + b]);
            if constexpr (Kind::HAS_OFFSET) {
                const Lanes offset = Kind::offset(strip, first + b);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    sums[r][first + b] = fma(splat(x[r * stride].sum), offset, sums[r][first + b]);
                }
            }
        }
    }
}

// Multiplies ROWS rows by a strip and emits the results row by row.
template <typename Kind, int ROWS>
inline void grouped_tile(const Matrix& matrix, const InputGroup* x, int64_t stride, const float* scales, int64_t row,
                         int64_t output, StripFetch fetch, Emit emit, const void* work) {
    const int64_t groups = (matrix.inputs + GROUP_SIZE - 1) / GROUP_SIZE;
    Lanes sums[ROWS][STRIP_BLOCKS];
#pragma GCC unroll 2
    for (int first = 0; first < STRIP_BLOCKS; first += GROUPED_BLOCKS) {
        sum_groups<Kind, ROWS, GROUPED_BLOCKS>(strip_of<Kind>(matrix, output), first, groups, x + row * stride, stride,
                                               fetch, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < STRIP_BLOCKS; ++b) {
            const int64_t at = output + b * LANES;
            const Lanes scaled = mul(mul(sums[r][b], splat(scales[row + r])), load(matrix.scale + at));
            sums[r][b] = matrix.bias == nullptr ? scaled : add(scaled, load(matrix.bias + at));
        }
        emit(work, row + r, output, sums[r], STRIP_BLOCKS);
    }
}

template <typename Kind>
void multiply_grouped(const Matrix& matrix, const InputGroup* x, int64_t stride, const float* scales, int64_t rows,
                      int64_t threads, Emit emit, const void* work) {
    constexpr int64_t LINES = Kind::BYTES / 64;
    const int64_t parts = (rows + TASK_ROWS - 1) / TASK_ROWS;
    parallel_for(matrix.outputs / PANEL * parts, threads, [&](int64_t task, int) {
        const int64_t panel = task / parts * PANEL, start = task % parts * TASK_ROWS;
        const int64_t end = start + TASK_ROWS < rows ? start + TASK_ROWS : rows;
        // The first tile waits for its weights. The other tiles share the prefetching of the next weights.
        const int64_t others = (end - start + GROUPED_ROWS - 1) / GROUPED_ROWS - 1;
        const int64_t share = others > 0 ? (LINES + others - 1) / others : 0;
        for (int64_t output = panel; output < panel + PANEL; output += STRIP) {
            const bool is_last = output + STRIP == panel + PANEL;
            StripFetch fetch{strip_of<Kind>(matrix, is_last ? panel + threads * PANEL : output + STRIP), 0, 0};
            for (int64_t row = start; row < end; row += GROUPED_ROWS) {
                with_rows<GROUPED_ROWS>(static_cast<int>(end - row), [&](auto count) {
                    grouped_tile<Kind, decltype(count)::value>(matrix, x, stride, scales, row, output, fetch, emit,
                                                               work);
                });
                const int64_t first = fetch.first + fetch.lines;
                fetch.first = first + share <= LINES ? first : LINES - share, fetch.lines = share;
            }
        }
    });
}

// Writes the weights of one output.
template <typename Kind>
void unpack_grouped(const Matrix& matrix, int64_t output, float* to) {
    const int64_t place = output % STRIP, block = place / LANES, lane = place % LANES;
    const uint8_t* group = strip_of<Kind>(matrix, output - place);
    for (int64_t input = 0; input < matrix.inputs; ++input) {
        const int64_t at = input % GROUP_SIZE, four = at / 4;
        if (input > 0 && at == 0) group += Kind::BYTES;
        const int64_t line = block * Kind::BITS + (Kind::BITS == 4 ? four / 2 : four);
        const int byte = group[line * 64 + lane * 4 + at % 4];
        const int code = Kind::BITS == 8 ? byte - 128 : (four % 2 == 0 ? byte & 15 : byte >> 4) - 8;
        const auto* spreads = reinterpret_cast<const half*>(group + Kind::SCALES) + place;
        const float offset = Kind::HAS_OFFSET ? to_float(spreads[STRIP]) : 0.f;
        to[input] = (to_float(spreads[0]) * static_cast<float>(code) + offset) * matrix.scale[output];
    }
}

}  // namespace kvasir
