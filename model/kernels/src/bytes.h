// Registers of bytes, for sums of products of integers.
#pragma once

#include "lanes.h"

namespace kvasir {

#if defined(__AVX512F__)
using Register = __m512i;
using Words = __v16si;
inline Register repeat_word(int32_t word) { return _mm512_set1_epi32(word); }
inline Register bitwise_and(Register x, Register y) { return _mm512_and_si512(x, y); }
inline Register bitwise_or(Register x, Register y) { return _mm512_or_si512(x, y); }
inline Register bitwise_xor(Register x, Register y) { return _mm512_xor_si512(x, y); }
template <int BITS>
inline Register shift_right(Register x) { return _mm512_srai_epi16(x, BITS); }
template <int BITS>
inline Register shift_words_left(Register x) { return _mm512_slli_epi32(x, BITS); }
inline Register add_halves(Register x, Register y) { return _mm512_add_epi16(x, y); }
inline Register add_words(Register x, Register y) { return _mm512_add_epi32(x, y); }
inline Register subtract_words(Register x, Register y) { return _mm512_sub_epi32(x, y); }
inline Register multiply_pairs(Register x, Register y) { return _mm512_madd_epi16(x, y); }
inline Register multiply_bytes(Register x, Register y) { return _mm512_maddubs_epi16(x, y); }
inline Register absolute_bytes(Register x) { return _mm512_abs_epi8(x); }
inline Register move_sign(Register x, Register from) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(from), _mm512_setzero_si512(), x);
}
#else
using Register = __m256i;
using Words = __v8si;
inline Register repeat_word(int32_t word) { return _mm256_set1_epi32(word); }
inline Register bitwise_and(Register x, Register y) { return _mm256_and_si256(x, y); }
inline Register bitwise_or(Register x, Register y) { return _mm256_or_si256(x, y); }
inline Register bitwise_xor(Register x, Register y) { return _mm256_xor_si256(x, y); }
template <int BITS>
inline Register shift_right(Register x) { return _mm256_srai_epi16(x, BITS); }
template <int BITS>
inline Register shift_words_left(Register x) { return _mm256_slli_epi32(x, BITS); }
inline Register add_halves(Register x, Register y) { return _mm256_add_epi16(x, y); }
inline Register add_words(Register x, Register y) { return _mm256_add_epi32(x, y); }
inline Register subtract_words(Register x, Register y) { return _mm256_sub_epi32(x, y); }
inline Register multiply_pairs(Register x, Register y) { return _mm256_madd_epi16(x, y); }
inline Register multiply_bytes(Register x, Register y) { return _mm256_maddubs_epi16(x, y); }
inline Register absolute_bytes(Register x) { return _mm256_abs_epi8(x); }
inline Register move_sign(Register x, Register from) { return _mm256_sign_epi8(x, from); }
#endif

// Keeps compilers from delaying the addition of x. Without it GCC first computes all products of a group, which do not fit
// in the 16 registers of AVX2.
inline Register kept(Register x) {
#if !defined(__AVX512F__)
    asm("" : "+x"(x));
#endif
    return x;
}

// add_bytes: adds the products of unsigned bytes x and signed bytes y: with VNNI four to each sum of 32 bits, else two to
// each sum of 16 bits. add_pairs: adds the products of two numbers of 16 bits to each sum of 32 bits.
#if defined(__AVX512VNNI__)
constexpr bool HAS_BYTE_DOT = true;
inline Register add_bytes(Register sum, Register x, Register y) { return _mm512_dpbusd_epi32(sum, x, y); }
inline Register add_pairs(Register sum, Register x, Register y) { return _mm512_dpwssd_epi32(sum, x, y); }
#elif defined(__AVXVNNI__)
constexpr bool HAS_BYTE_DOT = true;
inline Register add_bytes(Register sum, Register x, Register y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
inline Register add_pairs(Register sum, Register x, Register y) { return _mm256_dpwssd_avx_epi32(sum, x, y); }
#else
constexpr bool HAS_BYTE_DOT = false;
inline Register add_bytes(Register sum, Register x, Register y) { return kept(add_halves(sum, multiply_bytes(x, y))); }
inline Register add_pairs(Register sum, Register x, Register y) { return add_words(sum, multiply_pairs(x, y)); }
#endif

// 64 bytes: four numbers of 8 bits, two of 16 bits or one of 32 bits of each of LANES outputs. `each` returns work(x),
// register by register. `widened` converts two int8 numbers of each output to 16 bits. Compilers do not keep structures of
// Registers, which may alias any memory, in registers.
#if defined(__AVX512F__)
struct Bytes {
    Words v;
};
template <typename Work, typename... Same>
inline Bytes each(const Work& work, Same... x) { return {(Words)work((Register)x.v...)}; }
inline Bytes load_bytes(const void* from) { return {(Words)_mm512_loadu_si512(from)}; }
inline Bytes widened(__m128i low, __m128i high) { return {(Words)_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low))}; }
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
inline Bytes widened(__m128i low, __m128i high) {
    return {(Words)_mm256_cvtepi8_epi16(low), (Words)_mm256_cvtepi8_epi16(high)};
}
inline Lanes to_floats(Bytes x) { return {_mm256_cvtepi32_ps((Register)x.low), _mm256_cvtepi32_ps((Register)x.high)}; }
#endif

// Reads two int8 numbers of each output.
inline Bytes load_widened(const void* from) {
    const auto* halves = static_cast<const __m128i*>(from);
    return widened(_mm_loadu_si128(halves), _mm_loadu_si128(halves + 1));
}

// Reads an int8 number of each output, for both numbers of 16 bits.
inline Bytes load_twice(const void* from) {
    const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return widened(_mm_unpacklo_epi8(x, x), _mm_unpackhi_epi8(x, x));
}

inline int32_t load_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Returns a word in every output.
inline Bytes repeated(int32_t word) {
    return each([&](Register) { return repeat_word(word); }, Bytes());
}

// Adds the products of two numbers of 16 bits of each output.
inline Bytes add_pairs(Bytes sums, Bytes x, Bytes y) {
    return each([](Register sum, Register x, Register y) { return add_pairs(sum, x, y); }, sums, x, y);
}

// Adds the products of four codes of each output, from 0 to 63, and four signed inputs, not -128, the same for all
// outputs. Without VNNI, every output has two sums of 16 bits: the last one must fit, those before it may wrap.
inline Bytes dot_codes(Bytes sums, Bytes codes, Register inputs) {
    return each([&](Register sum, Register x) { return add_bytes(sum, x, inputs); }, sums, codes);
}

// Inputs of int8 matrices: with 128 added for VNNI, which multiplies unsigned by signed bytes.
using Int8Input = std::conditional_t<HAS_BYTE_DOT, uint8_t, int8_t>;

// Adds the products of four inputs, the same for all outputs, and four signed weights of each output.
inline Bytes dot(Bytes sums, Bytes weights, Register inputs) {
    return each(
        [&](Register sum, Register x) {
            if (HAS_BYTE_DOT) return add_bytes(sum, inputs, x);
            // Move the sign of the weights to the inputs: pairs of products then fit in 16 bits.
            const Register pairs = multiply_bytes(absolute_bytes(x), move_sign(inputs, x));
            return kept(add_words(sum, multiply_pairs(pairs, repeat_word(0x00010001))));
        },
        sums, weights);
}

// Adds the products of four signed inputs, the same for all outputs, and four weights of each output, with 128 added.
inline Bytes dot_shifted(Bytes sums, Bytes weights, Register inputs) {
    const auto subtract = [](Register x) { return bitwise_xor(x, repeat_word(static_cast<int32_t>(0x80808080))); };
    return HAS_BYTE_DOT ? dot_codes(sums, weights, inputs) : dot(sums, each(subtract, weights), inputs);
}

}  // namespace kvasir
