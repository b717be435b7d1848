// What attention is told of a step, and of each of its layers.
#pragma once

#include "kernel.h"

namespace kvasir {

// What all layers of a step share. Tables have table_width entries a sequence, of the cache's num_blocks. slots: where
// each token's key and value go, block * block_size + offset.
struct Batch {
    int64_t num_sequences, num_tokens, block_size, num_blocks, table_width;
    const int64_t *query_starts, *context_lengths, *tables, *slots;
};

// One layer. Queries, keys and values of the step's tokens are q_stride, k_stride, v_stride numbers apart; out and the
// cache have no gaps. window: positions a token sees, itself included; 0 for all. bias: null, or for each query head
// bias_stride numbers, of which [bias_length - 1 - d] is added to the score of a key d positions back.
struct Layer {
    const void *q, *k, *v;
    void *out, *keys, *values;
    int64_t q_stride, k_stride, v_stride, num_heads, num_kv_heads, head_size, window, bias_length, bias_stride, threads;
    const float* bias;
    float scale;
};

// Whether a step reads and writes within its cache.
bool is_within_cache(const Batch& batch);

}  // namespace kvasir
