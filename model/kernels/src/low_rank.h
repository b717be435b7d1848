// Low-rank additions of LoRA adapters to products with packed matrices: y += up (down x), Hu et al. 2021 (arXiv
// 2106.09685). Each row has an adapter of its own, or none. A row's sums have one order, whatever the other rows are.
#pragma once

#include "floats.h"

namespace kvasir {

// Weights of LANES adjacent outputs: Kind::GROUP inputs of each output, then the next inputs of each, and so on.
// groups: number of groups of inputs, from the group `first` on; the other inputs' weights are zero.
struct UpBlock {
    const void* weights;
    int64_t first, groups;
};

// Addition to one matrix. The weights are float if the matrix is float32, and otherwise bfloat16. down: blocks of LANES
// of the `rank` outputs, laid out as an UpBlock, for all inputs. up: a block for each LANES outputs of the packed matrix.
// rank: a multiple of LANES; 0: no addition.
struct LowRank {
    const void* down;
    const UpBlock* up;
    int64_t rank;
};

// Additions of one adapter to the matrices of a layer.
struct LayerAdapter {
    LowRank qkv, out, up, down;
};

// Rows that share the loads of an adapter's weights.
#if defined(__AVX512F__)
constexpr int ADAPTED_ROWS = 8;
#else
constexpr int ADAPTED_ROWS = 3;
#endif

// Adds the products of one group of inputs of ROWS rows to their sums.
template <typename Kind, int ROWS>
inline void add_group(const typename Kind::Weight* weights, const typename Kind::Input* x, int64_t stride,
                      Lanes (&sums)[ROWS]) {
#pragma GCC unroll 2
    for (int part = 0; part < Kind::PARTS; ++part) {
        const auto some = Kind::weights(weights, part);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums[r] = Kind::step(sums[r], some, Kind::spread(x + r * stride, part));
    }
}

// Computes LANES outputs of ROWS rows. Each row has two sums, of even and of odd groups: one sum would wait for itself.
template <typename Kind, int ROWS>
inline void multiply_block(const typename Kind::Weight* weights, int64_t groups, const typename Kind::Input* x,
                           int64_t stride, Lanes (&sums)[ROWS]) {
    constexpr int64_t GROUP = Kind::GROUP, STEP = LANES * Kind::GROUP;
    constexpr int64_t AHEAD = 32;
    Lanes odd[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r] = odd[r] = zeros();
    const auto* end = weights + groups * STEP;
    for (; weights + STEP < end; weights += 2 * STEP, x += 2 * GROUP) {
        __builtin_prefetch(weights + AHEAD * STEP, 0, 2);
        __builtin_prefetch(weights + (AHEAD + 1) * STEP, 0, 2);
        add_group<Kind, ROWS>(weights, x, stride, sums);
        add_group<Kind, ROWS>(weights + STEP, x + GROUP, stride, odd);
    }
    if (weights < end) add_group<Kind, ROWS>(weights, x, stride, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r] = add(sums[r], odd[r]);
}

// Computes down x for ROWS rows.
template <typename Kind, int ROWS>
inline void multiply_down(const LowRank& low, const typename Kind::Input* x, int64_t stride, int64_t groups,
                          typename Kind::Input* out, int64_t out_stride) {
    const auto* weights = static_cast<const typename Kind::Weight*>(low.down);
    for (int64_t first = 0; first < low.rank; first += LANES, weights += groups * LANES * Kind::GROUP) {
        Lanes sums[ROWS];
        multiply_block<Kind, ROWS>(weights, groups, x, stride, sums);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(out + r * out_stride + first, sums[r]);
    }
}

// Computes `blocks` blocks of up `low`, the result of `multiply_down`, for ROWS rows.
template <typename Kind, int ROWS>
inline void multiply_up(const UpBlock* block, int64_t blocks, const typename Kind::Input* low, int64_t low_stride,
                        float* out, int64_t out_stride) {
    for (int64_t b = 0; b < blocks; ++b, ++block, out += LANES) {
        Lanes sums[ROWS];
        multiply_block<Kind, ROWS>(static_cast<const typename Kind::Weight*>(block->weights), block->groups,
                                   low + block->first * Kind::GROUP, low_stride, sums);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(out + r * out_stride, sums[r]);
    }
}

}  // namespace kvasir
