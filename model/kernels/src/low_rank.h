// Low-rank additions of LoRA adapters to products with packed matrices: y += up (down x), Hu et al. 2021 (arXiv
// 2106.09685). Each row has an adapter of its own, or none. A row's sums have one order, whatever the other rows are.
#pragma once

#include "lanes.h"

namespace kvasir {

// Rows of `up` for LANES adjacent outputs of a packed matrix. weights: LANES numbers for each of the `count` inputs from
// `first` on; the other inputs' weights are zero.
struct UpBlock {
    const void* weights;
    int64_t first, count;
};

// Addition to one matrix. down: LANES of the `rank` outputs side by side, for one input after the other; then the next
// LANES. up: a block for each LANES outputs of the packed matrix. rank: a multiple of LANES; 0: no addition. is_short:
// the weights are bfloat16, not float.
struct LowRank {
    const void* down;
    const UpBlock* up;
    int64_t rank, is_short;
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

// Computes down x for ROWS rows. The sums of a row do not depend on ROWS.
template <typename Weight, int ROWS>
inline void multiply_down(const LowRank& low, const float* x, int64_t size, float* out, int64_t out_stride) {
    const auto* weights = static_cast<const Weight*>(low.down);
    for (int64_t first = 0; first < low.rank; first += LANES) {
        Lanes sums[ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zeros();
        for (int64_t at = 0; at < size; at += 2, weights += 2 * LANES) {  // sizes are even
            const Lanes even = load(weights), odd = load(weights + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                sums[r][0] = fma(splat(x[r * size + at]), even, sums[r][0]);
                sums[r][1] = fma(splat(x[r * size + at + 1]), odd, sums[r][1]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(out + r * out_stride + first, add(sums[r][0], sums[r][1]));
    }
}

// Calls work with a null pointer to the type of an adapter's weights.
template <typename Work>
inline void with_weight_type(const LowRank& low, const Work& work) {
    low.is_short ? work(static_cast<bf16*>(nullptr)) : work(static_cast<float*>(nullptr));
}

// Computes `blocks` blocks of up `low`, the result of `multiply_down`, for ROWS rows.
template <typename Weight, int ROWS>
inline void multiply_up(const UpBlock* block, int64_t blocks, const float* low, int64_t low_stride, float* out,
                        int64_t out_stride) {
    for (int64_t b = 0; b < blocks; ++b, ++block, out += LANES) {
        Lanes sums[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums[r] = zeros();
        const auto* weights = static_cast<const Weight*>(block->weights);
        const float* from = low + block->first;
        for (int64_t at = 0; at < block->count; ++at, weights += LANES) {
            const Lanes some = load(weights);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r] = fma(splat(from[r * low_stride + at]), some, sums[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(out + r * out_stride, sums[r]);
    }
}

}  // namespace kvasir
