// Low-rank additions of LoRA adapters to products with packed matrices: y += up (down x), Hu et al. 2021 (arXiv
// 2106.09685). Each row has an adapter of its own, or none. A row's sums have one order, whatever the other rows are.
#pragma once

#include "lanes.h"

namespace kvasir {

// Rows of `up` for LANES adjacent outputs of a packed matrix. weights: LANES numbers for each of the `count` inputs from
// `first` on; the other inputs' weights are zero.
struct UpBlock {
    const float* weights;
    int64_t first, count;
};

// Addition to one matrix. down: LANES of the `rank` outputs side by side, for one input after the other; then the next
// LANES. up: a block for each LANES outputs of the packed matrix. rank: a multiple of LANES; 0: no addition.
struct LowRank {
    const float* down;
    const UpBlock* up;
    int64_t rank;
};

// Additions of one adapter to the matrices of a layer.
struct LayerAdapter {
    LowRank qkv, out, up, down;
};

inline float to_float(float x) { return x; }

// Computes out = down x. Four sums hide the latency of a multiply-add.
template <typename Number>
inline void multiply_down(const LowRank& low, const Number* x, int64_t size, float* out) {
    const float* weights = low.down;
    for (int64_t first = 0; first < low.rank; first += LANES) {
        Lanes sums[4] = {zeros(), zeros(), zeros(), zeros()};
        int64_t at = 0;
        for (; at + 4 <= size; at += 4, weights += 4 * LANES) {
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) sums[n] = fma(splat(to_float(x[at + n])), load(weights + n * LANES), sums[n]);
        }
        for (; at < size; ++at, weights += LANES) sums[0] = fma(splat(to_float(x[at])), load(weights), sums[0]);
        store(out + first, add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    }
}

// Returns a block of LANES outputs of up `low`, the result of `multiply_down`.
inline Lanes multiply_up(const UpBlock& block, const float* low) {
    Lanes sums[2] = {zeros(), zeros()};
    const float* weights = block.weights;
    int64_t at = 0;
    for (low += block.first; at + 2 <= block.count; at += 2, weights += 2 * LANES) {
        sums[0] = fma(splat(low[at]), load(weights), sums[0]);
        sums[1] = fma(splat(low[at + 1]), load(weights + LANES), sums[1]);
    }
    if (at < block.count) sums[0] = fma(splat(low[at]), load(weights), sums[0]);
    return add(sums[0], sums[1]);
}

}  // namespace kvasir
