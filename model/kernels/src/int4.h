// Weights of 4 bits in groups of 32 inputs: w = scale * (multiplier * code + offset), all integers but the scale, which
// an output has once. A product with int8 inputs is thus one sum of integers: two levels of scales, as in QServe (Lin
// et al. 2024, arXiv:2405.04532).
//
// A step of a strip has two groups. It holds the codes of each block of LANES outputs in the first group, those in the
// second group, then for each output two multipliers (int8), then for each output two offsets (int16) if the matrix has
// any. The second group's multiplier and offset come first. Codes are unsigned: 8 is added. A register of 64 bytes has
// eight inputs of each output of a block: four in the low halves of the bytes, and the next four in the high halves.
#pragma once

#include "bytes.h"
#include "rows.h"
#include "strips.h"

namespace kvasir {

template <bool HAS_OFFSETS>
struct Int4 {
    using Input = InputPair;
    static constexpr int64_t INPUTS = 2 * GROUP_SIZE, BLOCK = LANES * GROUP_SIZE / 2;
    static constexpr int64_t MULTIPLIERS = 2 * STRIP_BLOCKS * BLOCK, OFFSETS = MULTIPLIERS + 2 * STRIP;  // positions
    static constexpr int64_t BYTES = OFFSETS + (HAS_OFFSETS ? 4 * STRIP : 0);
#if defined(__AVX512F__)
    static constexpr int ROWS = 6, BLOCKS = 2;  // of a tile: its sums take 24 of 32 registers
#else
    static constexpr int ROWS = 4, BLOCKS = 1;
#endif

    // Multiplies NUM_ROWS rows by a strip, without the outputs' scales.
    template <int NUM_ROWS>
    static void sum(const Matrix& matrix, int64_t output, const InputPair* x, int64_t stride, StripFetch fetch,
                    Lanes (&results)[NUM_ROWS][STRIP_BLOCKS]) {
        constexpr int PASS = blocks_of_pass(NUM_ROWS, BLOCKS);
#pragma GCC unroll 2
        for (int first = 0; first < STRIP_BLOCKS; first += PASS) {
            sum_steps<NUM_ROWS, PASS>(strip_of<Int4>(matrix, output), first, steps_of<Int4>(matrix), x, stride,
                                      fetch_of_pass<Int4, PASS>(fetch, first), results);
        }
    }

private:
    // Adds the products of a group to the sums of 32 bits of each output, for BLOCKS blocks from `block` on.
    template <int NUM_ROWS, int PASS>
    static void add_group(const uint8_t* codes, const InputPair* x, int64_t stride, int group, int block,
                          Bytes (&sums)[NUM_ROWS][PASS]) {
        const Register low_halves = repeat_word(0x0f0f0f0f);
        Bytes products[NUM_ROWS][BLOCKS];
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) products[r][b] = HAS_BYTE_DOT ? sums[r][block + b] : Bytes();
        }
#pragma GCC unroll 8
        for (int four = 0; four < GROUP_SIZE / 4; ++four) {
            Bytes weights[BLOCKS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) {
                const auto half = [&](Register both) {
                    return bitwise_and(four % 2 == 0 ? both : shift_right<4>(both), low_halves);
                };
                weights[b] = each(half, load_bytes(codes + b * BLOCK + four / 2 * 64));
            }
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
                const Register inputs = repeat_word(load_word(x[r * stride].codes[group] + four * 4));
#pragma GCC unroll 2
                for (int b = 0; b < BLOCKS; ++b) products[r][b] = dot_codes(products[r][b], weights[b], inputs);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; ++b) {
                sums[r][block + b] =
                    HAS_BYTE_DOT ? products[r][b] : add_pairs(sums[r][block + b], products[r][b], repeated(0x00010001));
            }
        }
    }

    // Multiplies NUM_ROWS rows by PASS blocks of a strip, from block `first` on.
    template <int NUM_ROWS, int PASS>
    static void sum_steps(const uint8_t* from, int first, int64_t steps, const InputPair* x, int64_t stride,
                          StripFetch fetch, Lanes (&results)[NUM_ROWS][STRIP_BLOCKS]) {
        Bytes sums[NUM_ROWS][PASS];
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < PASS; ++b) sums[r][b] = Bytes();
        }
        for (int64_t step = 0; step < steps; ++step, from += BYTES, ++x) {
            const Lines lines = lines_of<Int4, NUM_ROWS>(fetch, from, step, steps);
            lines.prefetch(0, 2);
            // Sums of the second group in the lower, and of the first group in the upper halves of 32 bits.
            Bytes pairs[NUM_ROWS][PASS];
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
                for (int b = 0; b < PASS; ++b) pairs[r][b] = repeated(x[r * stride].starts[0]);
            }
#pragma GCC unroll 2
            for (int b = 0; b < PASS; b += BLOCKS) {
                add_group<NUM_ROWS, PASS>(from + (first + b) * BLOCK, x, stride, 0, b, pairs);
            }
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
                const Register start = repeat_word(x[r * stride].starts[1]);
                const auto shift = [&](Register sum) { return add_words(shift_words_left<16>(sum), start); };
#pragma GCC unroll 2
                for (int b = 0; b < PASS; ++b) pairs[r][b] = each(shift, pairs[r][b]);
            }
            lines.prefetch(1, 2);
#pragma GCC unroll 2
            for (int b = 0; b < PASS; b += BLOCKS) {
                add_group<NUM_ROWS, PASS>(from + (STRIP_BLOCKS + first + b) * BLOCK, x, stride, 1, b, pairs);
            }
#pragma GCC unroll 2
            for (int b = 0; b < PASS; ++b) {
                const Bytes multipliers = load_widened(from + MULTIPLIERS + (first + b) * 2 * LANES);
                const auto subtract = [](Register sum) { return bitwise_xor(sum, repeat_word(0x8000)); };
#pragma GCC unroll 8
                for (int r = 0; r < NUM_ROWS; ++r) {
                    sums[r][b] = add_pairs(sums[r][b], each(subtract, pairs[r][b]), multipliers);
                }
                if constexpr (HAS_OFFSETS) {
                    const Bytes offsets = load_bytes(from + OFFSETS + (first + b) * 4 * LANES);
#pragma GCC unroll 8
                    for (int r = 0; r < NUM_ROWS; ++r) {
                        sums[r][b] = add_pairs(sums[r][b], offsets, repeated(load_word(x[r * stride].sums)));
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
#pragma GCC unroll 2
            for (int b = 0; b < PASS; ++b) results[r][first + b] = to_floats(sums[r][b]);
        }
    }
};

// Writes the weights of one output.
template <bool HAS_OFFSETS>
void unpack(Int4<HAS_OFFSETS>, const Matrix& matrix, int64_t output, float* to) {
    using Kind = Int4<HAS_OFFSETS>;
    const int64_t place = output % STRIP;
    const uint8_t* from = strip_of<Kind>(matrix, output);
    for (int64_t input = 0; input < matrix.inputs; ++input) {
        const int64_t at = input % GROUP_SIZE, group = input / GROUP_SIZE % 2;
        if (input > 0 && input % Kind::INPUTS == 0) from += Kind::BYTES;
        const uint8_t* block = from + (group * STRIP_BLOCKS + place / LANES) * Kind::BLOCK;
        const int byte = block[at / 8 * 64 + place % LANES * 4 + at % 4];
        const int code = (at / 4 % 2 == 0 ? byte & 15 : byte >> 4) - 8;
        const int multiplier = static_cast<int8_t>(from[Kind::MULTIPLIERS + place * 2 + 1 - group]);
        int16_t offset = 0;
        if (HAS_OFFSETS) std::memcpy(&offset, from + Kind::OFFSETS + (place * 2 + 1 - group) * 2, sizeof offset);
        to[input] = static_cast<float>(code * multiplier + offset) * matrix.scale[output];
    }
}

}  // namespace kvasir
