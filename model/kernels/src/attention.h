// Arguments of attention: AttentionBatch for a step, AttentionCall for each of its layers.
#pragma once

#include "kernel.h"

namespace kvasir {

// Arguments that all layers of a step share. tables: table_width block numbers for each sequence, each below
// num_blocks. slots: cache slot of each token's key and value, block * block_size + offset.
struct AttentionBatch {
    int64_t num_sequences, num_tokens, block_size, num_blocks, table_width;
    const int64_t *query_starts, *context_lengths, *tables, *slots;
};

// Arguments of one layer. q_stride, k_stride and v_stride are the distances between tokens, in numbers; out and the
// cache are contiguous. window: number of positions that a token sees, its own included; 0: no limit. bias: null, or
// bias_stride floats for each query head. The float at [bias_length - 1 - d] is added to the score of a key d positions
// back. Biases are multiplied by log2(e), because weights are computed as powers of two.
struct AttentionCall {
    const void *q, *k, *v;
    void *out, *keys, *values;
    int64_t q_stride, k_stride, v_stride, num_heads, num_kv_heads, head_size, window, bias_length, bias_stride, threads;
    const float* bias;
    float scale;
};

using AttentionKernel = void (*)(const AttentionBatch* batch, const AttentionCall* call);

// Returns whether all slots and blocks of a step are within the cache.
bool is_within_cache(const AttentionBatch& batch);

}  // namespace kvasir
