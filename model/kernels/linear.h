// x W^T: rows of inputs times a packed matrix. Every output is one sum over the inputs in their order, whatever the
// number of rows and threads: the same bits alone and in any batch.
#pragma once

#include "kernel.h"
#include "lanes.h"

namespace kvasir {

enum class Numbers : int64_t { float32 = 0, bfloat16 = 1, int8 = 2 };

// A matrix as Python hands it over. Outputs lie in panels, the last padded with zeros; in a panel, `GROUP` inputs of the
// first output, of the second and so on, then the next inputs: one stream of memory, from a matrix's begin to its end.
struct Matrix {
    const void* weight;
    const float* bias;     // of every padded output, or null
    const float* scale;    // int8: of every padded output
    const int32_t* shift;  // int8: 128 times the sum of an output's weights, since inputs are given with 128 added
    int64_t inputs;
    int64_t outputs;  // padded
    Numbers numbers;
};

// Rows that are multiplied with bfloat16.
#if defined(KVASIR_BF16_DOT)
using Bfloat16Input = bf16;
#else
using Bfloat16Input = float;
#endif

constexpr int64_t PANEL = 64;  // outputs that one task computes
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;  // 24 of 32 registers hold sums
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 2;
#endif

// Takes TILE_BLOCKS blocks of one row's results, from an output on. Of every row and output once, on any thread.
using Emit = void (*)(const void* work, int64_t row, int64_t output, const Lanes* results);

// How many inputs of an output lie side by side.
int64_t side_by_side(Numbers numbers);

// All rows of x, `stride` inputs each, times all of the matrix. scales: of rows of eight bits.
void multiply(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows, int64_t threads,
              Emit emit, const void* work);

template <typename Work>
void multiply(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows, int64_t threads,
              const Work& work) {
    const Emit emit = [](const void* work, int64_t row, int64_t output, const Lanes* results) {
        (*static_cast<const Work*>(work))(row, output, results);
    };
    multiply(matrix, x, stride, scales, rows, threads, emit, &work);
}

}  // namespace kvasir
