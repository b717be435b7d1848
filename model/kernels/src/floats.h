// Kinds of matrices with float32 and bfloat16 weights: how a product loads and multiplies them.
#pragma once

#include "bytes.h"
#include "kernel.h"

namespace kvasir {

// Each matrix type stores GROUP adjacent inputs of an output and multiplies a group in PARTS passes. SUMS: most blocks of
// sums of a tile.
struct Float32 {
    using Weight = float;
    using Input = float;
    using Sums = Lanes;
    using Spread = Lanes;
    static constexpr int GROUP = 1, PARTS = 1, SUMS = TILE_SUMS;
    static Sums zero() { return zeros(); }
    static Lanes weights(const Weight* from, int) { return load(from); }
    static Spread spread(const Input* from, int) { return splat(*from); }
    static Sums step(Sums sums, Lanes weights, Spread inputs) { return fma(weights, inputs, sums); }
};

#if defined(KVASIR_BF16_DOT)
struct Bfloat16 {
    using Weight = bf16;
    using Input = Bfloat16Input;
    using Sums = Lanes;
    using Spread = __m512bh;
    static constexpr int GROUP = 2, PARTS = 1, SUMS = TILE_SUMS;
    static Sums zero() { return zeros(); }
    static __m512bh weights(const Weight* from, int) { return (__m512bh)_mm512_loadu_si512(from); }
    static Spread spread(const Input* from, int) { return (__m512bh)_mm512_set1_epi32(load_word(from)); }
    static Sums step(Sums sums, __m512bh weights, Spread inputs) {
        return {_mm512_dpbf16_ps(sums.v, weights, inputs)};
    }
};
#else
// Without bfloat16 dot products: a shift or a mask widens each half of a pair to float.
struct Bfloat16 {
    using Weight = bf16;
    using Input = Bfloat16Input;
    using Sums = Lanes;
    using Spread = Lanes;
    static constexpr int GROUP = 2, PARTS = 2, SUMS = FEWER_SUMS;
    static Sums zero() { return zeros(); }
    static Lanes weights(const Weight* from, int part) { return load_of_pairs(from, part == 1); }
    static Spread spread(const Input* from, int part) { return splat(from[part]); }
    static Sums step(Sums sums, Lanes weights, Spread inputs) { return fma(weights, inputs, sums); }
};
#endif

}  // namespace kvasir
