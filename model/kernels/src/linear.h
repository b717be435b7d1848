// x W^T: product of rows of inputs and a packed matrix. Every output is one sum over the inputs in their order, for any
// number of rows and threads. Results are therefore batch-invariant.
#pragma once

#include "kernel.h"
#include "lanes.h"

namespace kvasir {

enum class Numbers : int64_t { float32 = 0, bfloat16 = 1, int8 = 2 };

// Packed matrix, laid out by Python. Outputs are grouped in panels of PANEL, the last panel padded with zeros. A panel
// holds the first `GROUP` inputs of each output, then the next `GROUP` inputs of each output, and so on. A product thus
// reads the memory of a matrix sequentially.
struct Matrix {
    const void* weight;
    const float* bias;     // for every padded output, or null
    const float* scale;    // int8: scale of every padded output
    const int32_t* shift;  // int8: 128 times the sum of an output's weights, because inputs have 128 added
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

constexpr int64_t PANEL = 64;  // outputs that one task computes
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;  // sums take 24 of 32 registers
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 2;
#endif

// Receives the results of one row for TILE_BLOCKS blocks of LANES outputs, starting at `output`. Called once for every
// row and output, on any thread.
using Emit = void (*)(const void* work, int64_t row, int64_t output, const Lanes* results);

// Returns GROUP: the number of adjacent inputs of one output in a packed matrix.
int64_t side_by_side(Numbers numbers);

// Multiplies all rows of x with the matrix and passes the results to emit. stride: distance between rows, in inputs.
// scales: scale of each row, for int8 only.
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
