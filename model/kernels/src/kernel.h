// Declarations that the source files share: threads and their memory, attention, and products with packed matrices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "lanes.h"

#define KVASIR_KERNEL extern "C" __attribute__((visibility("default")))

namespace kvasir {

// Calls work(data, index, thread) for every index from 0 to count - 1. See parallel_for, and threads.cpp.
using Work = void (*)(const void* data, int64_t index, int thread);
void run_parallel(int64_t count, int64_t threads, Work work, const void* data);

// Calls work(index, thread) for every index from 0 to count - 1, on up to `threads` threads, the caller's included; on
// the caller's alone while another thread owns the pool (`Busy`). `thread` is unique among the running threads. Returns
// when the last index is finished, even if some threads never started: a thread that the system does not schedule
// delays no other thread.
template <typename Callable>
void parallel_for(int64_t count, int64_t threads, const Callable& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index, 0);
        return;
    }
    const Work call = [](const void* data, int64_t index, int thread) {
        (*static_cast<const Callable*>(data))(index, thread);
    };
    run_parallel(count, threads, call, &work);
}

// Scratch memory of one thread, aligned to pages. Grows as needed and is kept for later steps.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0;

    // Ends the process if the system has no more memory: the service replaces a worker that ends.
    char* reserve(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, size));
            if (memory == nullptr) {
                std::fprintf(stderr, "kvasir: out of memory: a kernel needs %zu bytes of scratch memory\n", size);
                std::abort();
            }
        }
        return memory;
    }
};

// While an object of this class exists, its thread owns the thread pool, unless another thread does. Idle threads of an
// owned pool spin for a while before they sleep: parts of a step follow each other within microseconds.
class Busy {
public:
    Busy();
    ~Busy();
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
};

// Arguments of attention that all layers of a step share. tables: table_width block numbers for each sequence, each
// below num_blocks. slots: cache slot of each token's key and value, block * block_size + offset.
struct AttentionBatch {
    int64_t num_sequences, num_tokens, block_size, num_blocks, table_width;
    const int64_t *query_starts, *context_lengths, *tables, *slots;
};

// Arguments of attention for one layer. k, v: null if another layer has written these tokens to the cache. Strides are the distances between tokens, in numbers; out and the cache are
// contiguous. window: number of positions that a token sees, its own included; 0: no limit. bias: null, or bias_stride
// floats for each query head: [bias_length - 1 - d] is added to the score of a key d positions back. Biases are
// multiplied by log2(e), because weights are computed as powers of two. soft_cap: bound of the scaled products, as in
// `soft_cap` of lanes.h; 0: no bound. key_scales, value_scales: scales of an int8 cache, one for each key or value:
// [block][key/value head][offset in the block].
struct AttentionCall {
    const void *q, *k, *v;
    void *out, *keys, *values;
    int64_t q_stride, k_stride, v_stride, num_heads, num_kv_heads, head_size, window, bias_length, bias_stride, threads;
    const float* bias;
    float *key_scales, *value_scales;
    float scale, soft_cap;
};

using AttentionKernel = void (*)(const AttentionBatch* batch, const AttentionCall* call);

// Types of matrices. int4: 4 bits with a multiplier, and perhaps an offset, for 32 inputs; see int4.h. Grouped: 8 bits
// with a scale, and perhaps an offset, for 32 inputs; see grouped.h. int6: 6 bits with a multiplier for 16 inputs, and
// perhaps an offset for 32; see int6.h.
enum class Numbers : int64_t {
    float32 = 0,
    bfloat16 = 1,
    int8 = 2,
    int4 = 3,
    int4_offset = 4,
    grouped8 = 5,
    grouped8_offset = 6,
    int6 = 7,
    int6_offset = 8
};

// Packed matrix, laid out by Python. Outputs are grouped in panels of PANEL, the last panel padded with zeros. A panel
// holds the first `GROUP` inputs of each output, then the next `GROUP` inputs of each output, and so on. A product thus
// reads the memory of a matrix sequentially.
struct Matrix {
    const void* weight;
    const float* bias;     // for every padded output, or null
    const float* scale;    // of every padded output of a quantized matrix
    const int32_t* shift;  // int8: 128 times the sum of an output's weights, because inputs for VNNI have 128 added
    int64_t inputs;
    int64_t outputs;  // padded
    Numbers numbers;
};

// Type of the inputs of a bfloat16 matrix.
#if defined(KVASIR_BF16_DOT)
using Bfloat16Input = bf16;
#else
using Bfloat16Input = float;
#endif

constexpr int64_t PANEL = 64;      // outputs that one task computes
constexpr int64_t TASK_ROWS = 96;  // largest number of rows that one task computes
constexpr int TILE_ROWS = 6, TILE_BLOCKS = PANEL / LANES;
// Blocks of sums that stay in registers: 24 of 32 registers, or 12 of 16, where a block takes two. FEWER_SUMS: if weights
// are converted in further registers.
#if defined(__AVX512F__)
constexpr int TILE_SUMS = 24, FEWER_SUMS = 24;
#else
constexpr int TILE_SUMS = 6, FEWER_SUMS = 5;
#endif

// Returns how many panels a task of one tile reads in sequence: up to 512 KiB, if that leaves eight tasks or more to each
// thread.
inline int64_t panels_in_sequence(int64_t panels, int64_t panel_bytes, int64_t threads) {
    return std::max<int64_t>(1, std::min(panels / threads / 8, (1 << 19) / panel_bytes));
}

// Receives the results of one row for `blocks` blocks, an even number, of LANES outputs, starting at `output`. Called
// once for every row and output, on any thread.
using Emit = void (*)(const void* work, int64_t row, int64_t output, const Lanes* results, int blocks);

// Computes x W^T for all rows of x and passes the results to emit. Every output is one sum over the inputs in their
// order, so results are batch-invariant. stride: distance between rows, in inputs. scales: scale of each row, for
// quantized matrices.
void multiply(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows, int64_t threads,
              Emit emit, const void* work);

// Piece of a product: the `outputs` outputs from `output` on, whole panels, for the rows from `first` to `end` - 1.
struct Piece {
    int64_t output, outputs, first, end;
};

// Computes one piece of a product on the calling thread. See `multiply`.
void multiply_piece(const Matrix& matrix, const void* x, int64_t stride, const float* scales, Piece piece, Emit emit,
                    const void* work);

// Writes the weights of one output of a quantized matrix.
void unpack_row(const Matrix& matrix, int64_t output, float* to);

}  // namespace kvasir
