// Weights of 8 bits in groups of 32 inputs: w = scale * code + offset.
//
// A step of a strip is a group. It holds the codes, four inputs of each output at a time, then a float16 scale for each
// output, then float16 offsets if the matrix has any. Codes are unsigned: 128 is added. Scales and offsets are divided by a power of two for each output, which is Matrix::scale.
#pragma once

#include "bytes.h"
#include "rows.h"
#include "strips.h"

namespace kvasir {

template <bool HAS_OFFSETS>
struct Grouped {
    using Input = InputGroup;
    static constexpr int64_t INPUTS = GROUP_SIZE, FOUR = STRIP * 4;  // FOUR: bytes of four inputs
    static constexpr int64_t SCALES = GROUP_SIZE / 4 * FOUR, OFFSETS = SCALES + 2 * STRIP;  // positions
    static constexpr int64_t BYTES = OFFSETS + (HAS_OFFSETS ? 2 * STRIP : 0);
#if defined(__AVX512F__)
    static constexpr int ROWS = 6, BLOCKS = 2;  // of a tile: integer and float sums take 24 of 32 registers
#else
    static constexpr int ROWS = 4, BLOCKS = 1;
#endif

    // Multiplies NUM_ROWS rows by a strip, without the outputs' scales.
    template <int NUM_ROWS>
    static void sum(const Matrix& matrix, int64_t output, const InputGroup* x, int64_t stride, StripFetch fetch,
                    Lanes (&results)[NUM_ROWS][STRIP_BLOCKS]) {
#pragma GCC unroll 2
        for (int first = 0; first < STRIP_BLOCKS; first += BLOCKS) {
            sum_groups<NUM_ROWS>(strip_of<Grouped>(matrix, output), first, steps_of<Grouped>(matrix), x, stride,
                                 fetch_of_pass<Grouped, BLOCKS>(fetch, first), results);
        }
    }

private:
    // As `sum`, for BLOCKS blocks of the strip, from block `first` on.
    template <int NUM_ROWS>
    static void sum_groups(const uint8_t* from, int first, int64_t groups, const InputGroup* x, int64_t stride,
                           StripFetch fetch, Lanes (&sums)[NUM_ROWS][STRIP_BLOCKS]) {
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) sums[r][first + b] = zeros();
        }
        for (int64_t group = 0; group < groups; ++group, from += BYTES, ++x) {
            const Lines lines = lines_of<Grouped, NUM_ROWS>(fetch, from, group, groups);
            lines.prefetch(0, 2);
            Bytes counts[NUM_ROWS][BLOCKS];
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; ++b) counts[r][b] = repeated(x[r * stride].start);
            }
#pragma GCC unroll 8
            for (int four = 0; four < GROUP_SIZE / 4; ++four) {
                if (four == GROUP_SIZE / 8) lines.prefetch(1, 2);
                Bytes weights[BLOCKS];
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; ++b) weights[b] = load_bytes(from + four * FOUR + (first + b) * 64);
#pragma GCC unroll 8
                for (int r = 0; r < NUM_ROWS; ++r) {
                    const Register inputs = repeat_word(load_word(x[r * stride].codes + 4 * four));
#pragma GCC unroll 2
                    for (int b = 0; b < BLOCKS; ++b) counts[r][b] = dot_shifted(counts[r][b], weights[b], inputs);
                }
            }
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) {
                const auto* spreads = reinterpret_cast<const half*>(from + SCALES) + (first + b) * LANES;
                const Lanes scale = load(spreads);
#pragma GCC unroll 8
                for (int r = 0; r < NUM_ROWS; ++r) {
                    sums[r][first + b] = fma(to_floats(counts[r][b]), scale, sums[r][first + b]);
                }
                if constexpr (HAS_OFFSETS) {
                    const Lanes offset = load(spreads + STRIP);
#pragma GCC unroll 8
                    for (int r = 0; r < NUM_ROWS; ++r) {
                        sums[r][first + b] = fma(splat(x[r * stride].sum), offset, sums[r][first + b]);
                    }
                }
            }
        }
    }
};

// Writes the weights of one output.
template <bool HAS_OFFSETS>
void unpack(Grouped<HAS_OFFSETS>, const Matrix& matrix, int64_t output, float* to) {
    using Kind = Grouped<HAS_OFFSETS>;
    const int64_t place = output % STRIP;
    const uint8_t* group = strip_of<Kind>(matrix, output);
    for (int64_t input = 0; input < matrix.inputs; ++input) {
        const int64_t at = input % GROUP_SIZE;
        if (input > 0 && at == 0) group += Kind::BYTES;
        const int code = group[at / 4 * Kind::FOUR + place * 4 + at % 4] - 128;
        const auto* spreads = reinterpret_cast<const half*>(group + Kind::SCALES) + place;
        const float offset = HAS_OFFSETS ? to_float(spreads[STRIP]) : 0.f;
        to[input] = (to_float(spreads[0]) * static_cast<float>(code) + offset) * matrix.scale[output];
    }
}

}  // namespace kvasir
