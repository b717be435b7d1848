// Weights of 6 bits in blocks of 256 inputs, as in GGUF's Q6_K: w = factor * multiplier * code, with a multiplier, an
// int8, for 16 inputs and a float16 factor for the block. If the matrix has offsets, offset_factor * offset is added,
// with an offset, an int8, for 32 inputs, so that Q4_K and Q5_K are exact too.
//
// A step of a strip is a block. It holds each output's factor, then for each pair of groups the multipliers and the
// codes, and last any offsets and their factors: the order of reading, which CPUs prefetch. Codes are unsigned: 32 is
// added. The codes of a group are those of each block of LANES outputs, in three registers of 64 bytes: four codes of
// each output in the low six bits of every register, and two bits of each of the last four codes in the other two.
#pragma once

#include "bytes.h"
#include "rows.h"
#include "strips.h"

namespace kvasir {

template <bool HAS_OFFSETS>
struct Int6 {
    using Input = InputBlock;
    static constexpr int64_t INPUTS = InputBlock::INPUTS, GROUPS = InputBlock::GROUPS, FOURS = INPUTS / GROUPS / 4;
    static constexpr int64_t BLOCK = 3 * 64, CODES = STRIP_BLOCKS * BLOCK, PAIR = 2 * (STRIP + CODES);
    static constexpr int64_t OFFSETS = 2 * STRIP + GROUPS / 2 * PAIR, OFFSET_FACTORS = OFFSETS + GROUPS / 2 * STRIP;
    static constexpr int64_t BYTES = HAS_OFFSETS ? OFFSET_FACTORS + 2 * STRIP : OFFSETS;

    // Places in a step of the multipliers and of the codes of a group.
    static int64_t multipliers(int64_t group) { return 2 * STRIP + group / 2 * PAIR + group % 2 * STRIP; }
    static int64_t codes(int64_t group) { return 4 * STRIP + group / 2 * PAIR + group % 2 * CODES; }
#if defined(__AVX512F__)
    static constexpr int ROWS = 6, BLOCKS = 2;  // of a tile: integer and float sums take 24 of 32 registers
#else
    static constexpr int ROWS = 4, BLOCKS = 1;
#endif

    // Multiplies NUM_ROWS rows by a strip, without the outputs' scales.
    template <int NUM_ROWS>
    static void sum(const Matrix& matrix, int64_t output, const InputBlock* x, int64_t stride, StripFetch fetch,
                    Lanes (&results)[NUM_ROWS][STRIP_BLOCKS]) {
        constexpr int PASS = blocks_of_pass(NUM_ROWS, BLOCKS);
#pragma GCC unroll 2
        for (int first = 0; first < STRIP_BLOCKS; first += PASS) {
            sum_steps<NUM_ROWS, PASS>(strip_of<Int6>(matrix, output), first, steps_of<Int6>(matrix), x, stride,
                                      fetch_of_pass<Int6, PASS>(fetch, first), results);
        }
    }

private:
    // Returns four codes of each output, from 0 to 63.
    static Bytes unpacked(const uint8_t* codes, int four) {
        const auto mask = [](Register x, int word) { return bitwise_and(x, repeat_word(word)); };
        if (four < 3) return each([&](Register x) { return mask(x, 0x3f3f3f3f); }, load_bytes(codes + four * 64));
        const auto join = [&](Register x, Register y, Register z) {
            return bitwise_or(bitwise_or(mask(shift_right<6>(x), 0x03030303), mask(shift_right<4>(y), 0x0c0c0c0c)),
                              mask(shift_right<2>(z), 0x30303030));
        };
        return each(join, load_bytes(codes), load_bytes(codes + 64), load_bytes(codes + 128));
    }

    // Adds the products of a group's codes and inputs to `counts`, for BLOCKS blocks whose codes begin at `from`.
    template <int NUM_ROWS>
    static void add_group(const uint8_t* from, int64_t group, const InputBlock* x, int64_t stride,
                          Bytes (&counts)[NUM_ROWS][BLOCKS]) {
#pragma GCC unroll 4
        for (int four = 0; four < FOURS; ++four) {
            Bytes weights[BLOCKS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) weights[b] = unpacked(from + b * BLOCK, four);
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
                const Register inputs = repeat_word(load_word(x[r * stride].codes + (group * FOURS + four) * 4));
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; ++b) counts[r][b] = dot_codes(counts[r][b], weights[b], inputs);
            }
        }
    }

    // Multiplies NUM_ROWS rows by PASS blocks of a strip, from block `first` on.
    template <int NUM_ROWS, int PASS>
    static void sum_steps(const uint8_t* from, int first, int64_t steps, const InputBlock* x, int64_t stride,
                          StripFetch fetch, Lanes (&results)[NUM_ROWS][STRIP_BLOCKS]) {
        Lanes sums[NUM_ROWS][PASS];
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < PASS; ++b) sums[r][b] = zeros();
        }
        for (int64_t step = 0; step < steps; ++step, from += BYTES, ++x) {
            const Lines lines = lines_of<Int6, NUM_ROWS>(fetch, from, step, steps);
            const auto* factors = reinterpret_cast<const half*>(from) + first * LANES;
            // Without VNNI: sums of the step in integers, since a sum of 16 bits times a multiplier is one instruction.
            Bytes totals[NUM_ROWS][PASS];
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
                for (int b = 0; b < PASS; ++b) totals[r][b] = Bytes();
            }
            for (int64_t group = 0; group < GROUPS; ++group) {
                lines.prefetch(group, GROUPS);
                const auto* scales = reinterpret_cast<const int8_t*>(from + multipliers(group)) + first * LANES;
#pragma GCC unroll 2
                for (int block = 0; block < PASS; block += BLOCKS) {
                    Bytes counts[NUM_ROWS][BLOCKS];
#pragma GCC unroll 8
                    for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
                        for (int b = 0; b < BLOCKS; ++b) counts[r][b] = repeated(x[r * stride].starts[group]);
                    }
                    add_group<NUM_ROWS>(from + codes(group) + (first + block) * BLOCK, group, x, stride, counts);
#pragma GCC unroll 2
                    for (int b = 0; b < BLOCKS; ++b) {
                        const int64_t at = (block + b) * LANES;
                        if constexpr (HAS_BYTE_DOT) {
                            const Lanes scale = mul(load(scales + at), load(factors + at));
#pragma GCC unroll 8
                            for (int r = 0; r < NUM_ROWS; ++r) {
                                sums[r][block + b] = fma(to_floats(counts[r][b]), scale, sums[r][block + b]);
                            }
                        } else {
                            const Bytes scale = load_twice(scales + at);
#pragma GCC unroll 8
                            for (int r = 0; r < NUM_ROWS; ++r) {
                                totals[r][block + b] = add_pairs(totals[r][block + b], counts[r][b], scale);
                            }
                        }
                    }
                }
            }
            if constexpr (!HAS_BYTE_DOT) {
#pragma GCC unroll 2
                for (int b = 0; b < PASS; ++b) {
                    const Lanes factor = load(factors + b * LANES);
#pragma GCC unroll 8
                    for (int r = 0; r < NUM_ROWS; ++r) sums[r][b] = fma(to_floats(totals[r][b]), factor, sums[r][b]);
                }
            }
            if constexpr (HAS_OFFSETS) {
                const auto* offsets = reinterpret_cast<const int8_t*>(from + OFFSETS) + first * LANES;
                const auto* offset_factors = reinterpret_cast<const half*>(from + OFFSET_FACTORS) + first * LANES;
                for (int64_t pair = 0; pair < GROUPS / 2; ++pair, offsets += STRIP) {
#pragma GCC unroll 2
                    for (int b = 0; b < PASS; ++b) {
                        const Lanes offset = mul(load(offsets + b * LANES), load(offset_factors + b * LANES));
#pragma GCC unroll 8
                        for (int r = 0; r < NUM_ROWS; ++r) {
                            sums[r][b] = fma(splat(x[r * stride].sums[pair]), offset, sums[r][b]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < PASS; ++b) results[r][first + b] = sums[r][b];
        }
    }
};

// Writes the weights of one output.
template <bool HAS_OFFSETS>
void unpack(Int6<HAS_OFFSETS>, const Matrix& matrix, int64_t output, float* to) {
    using Kind = Int6<HAS_OFFSETS>;
    const int64_t place = output % STRIP;
    const uint8_t* from = strip_of<Kind>(matrix, output);
    for (int64_t input = 0; input < matrix.inputs; ++input) {
        const int64_t at = input % Kind::INPUTS, group = at / 16;
        if (input > 0 && at == 0) from += Kind::BYTES;
        const uint8_t* codes = from + Kind::codes(group) + place / LANES * Kind::BLOCK + place % LANES * 4 + at % 4;
        const int last = codes[0] >> 6 | codes[64] >> 6 << 2 | codes[128] >> 6 << 4;
        const int code = (at % 16 < 12 ? codes[at % 16 / 4 * 64] & 63 : last) - 32;
        const float factor = to_float(reinterpret_cast<const half*>(from)[place]);
        const auto multiplier = static_cast<int8_t>(from[Kind::multipliers(group) + place]);
        to[input] = factor * multiplier * static_cast<float>(code);
        if constexpr (HAS_OFFSETS) {
            const int8_t offset = reinterpret_cast<const int8_t*>(from + Kind::OFFSETS)[group / 2 * STRIP + place];
            to[input] += to_float(reinterpret_cast<const half*>(from + Kind::OFFSET_FACTORS)[place]) * offset;
        }
    }
}

}  // namespace kvasir
