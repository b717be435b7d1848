// Registers of bytes: sums of int8 products, and int8 weights made from 4 bits.
#pragma once

#include "lanes.h"

namespace kvasir {

#if defined(__AVX512F__)
using Register = __m512i;
using Words = __v16si;
inline Register repeat_word(int32_t word) { return _mm512_set1_epi32(word); }
inline Register repeat_sixteen(const void* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline Register bitwise_and(Register x, Register y) { return _mm512_and_si512(x, y); }
template <int BITS>
inline Register shift_left(Register x) { return _mm512_slli_epi16(x, BITS); }
template <int BITS>
inline Register shift_right(Register x) { return _mm512_srai_epi16(x, BITS); }
inline Register add_words(Register x, Register y) { return _mm512_add_epi32(x, y); }
inline Register subtract_words(Register x, Register y) { return _mm512_sub_epi32(x, y); }
inline Register multiply_pairs(Register x, Register y) { return _mm512_madd_epi16(x, y); }
inline Register multiply_round(Register x, Register y) { return _mm512_mulhrs_epi16(x, y); }
inline Register narrow(Register x, Register y) { return _mm512_packs_epi16(x, y); }
inline Register look_up(Register table, Register index) { return _mm512_shuffle_epi8(table, index); }
#else
using Register = __m256i;
using Words = __v8si;
inline Register repeat_word(int32_t word) { return _mm256_set1_epi32(word); }
inline Register repeat_sixteen(const void* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline Register bitwise_and(Register x, Register y) { return _mm256_and_si256(x, y); }
template <int BITS>
inline Register shift_left(Register x) { return _mm256_slli_epi16(x, BITS); }
template <int BITS>
inline Register shift_right(Register x) { return _mm256_srai_epi16(x, BITS); }
inline Register add_words(Register x, Register y) { return _mm256_add_epi32(x, y); }
inline Register subtract_words(Register x, Register y) { return _mm256_sub_epi32(x, y); }
inline Register multiply_pairs(Register x, Register y) { return _mm256_madd_epi16(x, y); }
inline Register multiply_round(Register x, Register y) { return _mm256_mulhrs_epi16(x, y); }
inline Register narrow(Register x, Register y) { return _mm256_packs_epi16(x, y); }
inline Register look_up(Register table, Register index) { return _mm256_shuffle_epi8(table, index); }
#endif

// 64 bytes: four int8 numbers, or one int32 number, of each of LANES outputs. `each` returns work(x), register by
// register. Compilers do not keep structures of Registers, which may alias any memory, in registers.
#if defined(__AVX512F__)
struct Bytes {
    Words v;
};
template <typename Work, typename... Same>
inline Bytes each(const Work& work, Same... x) { return {(Words)work((Register)x.v...)}; }
inline Bytes load_bytes(const void* from) { return {(Words)_mm512_loadu_si512(from)}; }
inline void store_bytes(void* to, Bytes x) { _mm512_storeu_si512(to, (Register)x.v); }
inline Lanes to_floats(Bytes x) { return {_mm512_cvtepi32_ps((Register)x.v)}; }
#else
struct Bytes {
    Words low, high;
};
template <typename Work, typename... Same>
inline Bytes each(const Work& work, Same... x) {
    return {(Words)work((Register)x.low...), (Words)work((Register)x.high...)};
}
inline Bytes load_bytes(const void* from) {
    const auto* halves = static_cast<const Register*>(from);
    return {(Words)_mm256_loadu_si256(halves), (Words)_mm256_loadu_si256(halves + 1)};
}
inline void store_bytes(void* to, Bytes x) {
    auto* halves = static_cast<Register*>(to);
    _mm256_storeu_si256(halves, (Register)x.low);
    _mm256_storeu_si256(halves + 1, (Register)x.high);
}
inline Lanes to_floats(Bytes x) { return {_mm256_cvtepi32_ps((Register)x.low), _mm256_cvtepi32_ps((Register)x.high)}; }
#endif

// Adds the products of four unsigned inputs, the same for all outputs, and four signed weights of each output.
inline Bytes dot(Bytes sums, Bytes weights, Register inputs) {
#if defined(__AVX512VNNI__)
    return each([&](Register sum, Register x) { return _mm512_dpbusd_epi32(sum, inputs, x); }, sums, weights);
#else
    const Register low_byte = repeat_word(0x00ff00ff);
    const Register even_inputs = bitwise_and(inputs, low_byte);
    const Register odd_inputs = bitwise_and(shift_right<8>(inputs), low_byte);
    return each(
        [&](Register sum, Register x) {
            const Register even = multiply_pairs(shift_right<8>(shift_left<8>(x)), even_inputs);
            return add_words(sum, add_words(even, multiply_pairs(shift_right<8>(x), odd_inputs)));
        },
        sums, weights);
#endif
}

// Weights of 4 bits, from which int8 weights are made: round(code * multiplier / 8), with codes from -8 to 7, and a
// multiplier from -127 to 127 for each group of inputs of an output. The two levels of scales are those of QServe (Lin
// et al. 2024, arXiv:2405.04532).
//
// A panel holds, for each group of inputs: the codes of each block of LANES outputs, then PANEL multipliers. The codes
// of a block take 64 bytes for eight inputs, 16 bytes for each quarter of the block's outputs. Every 16 bits hold four
// codes, from the lowest: input i of output o of the quarter (0 or 1), input i of output o + 2, and input i + 4 of the
// same two outputs.
constexpr int64_t INT4_GROUP = 32, INT4_BLOCK_BYTES = INT4_GROUP * LANES / 2;

// Shuffle indices that spread the 16 multipliers of a block over 64 bytes, 16 bytes for each quarter of the block.
// pairs[n]: multipliers of outputs 2n and 2n + 1 of the quarter, each in the upper half of 16 bits, above zeros.
struct Int4Indices {
    alignas(64) uint8_t pairs[2][64];
};
constexpr Int4Indices make_int4_indices() {
    Int4Indices made{};
    for (int at = 0; at < 64; ++at) {
        const int first = at / 16 * 4;
        for (int n = 0; n < 2; ++n) {
            made.pairs[n][at] = static_cast<uint8_t>(at % 2 == 0 ? 0x80 : first + 2 * n + at % 16 / 8);
        }
    }
    return made;
}
constexpr Int4Indices INT4_INDICES = make_int4_indices();

// Multipliers of a group of inputs for a block of outputs, each repeated for four inputs.
struct Int4Multipliers {
    Bytes low, high;  // of the even and of the odd pairs of outputs

    explicit Int4Multipliers(const void* multipliers) {
        const Register sixteen = repeat_sixteen(multipliers);
        const auto widen = [&](Register index) { return shift_right<8>(look_up(sixteen, index)); };
        low = each(widen, load_bytes(INT4_INDICES.pairs[0]));
        high = each(widen, load_bytes(INT4_INDICES.pairs[1]));
    }

    // Returns the int8 weights of the first four of eight inputs. A code in the highest 4 of 16 bits counts 2^12 times,
    // and multiply_round divides by 2^15, so the product is divided by 8.
    Bytes first(Bytes codes) const {
        const auto work = [](Register x, Register even, Register odd) {
            return narrow(multiply_round(shift_left<12>(x), even),
                          multiply_round(bitwise_and(shift_left<8>(x), highest()), odd));
        };
        return each(work, codes, low, high);
    }

    // Returns the int8 weights of the last four of eight inputs.
    Bytes second(Bytes codes) const {
        const auto work = [](Register x, Register even, Register odd) {
            return narrow(multiply_round(bitwise_and(shift_left<4>(x), highest()), even),
                          multiply_round(bitwise_and(x, highest()), odd));
        };
        return each(work, codes, low, high);
    }

private:
    static Register highest() { return repeat_word(static_cast<int32_t>(0xf000f000)); }
};

}  // namespace kvasir
