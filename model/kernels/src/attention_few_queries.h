// Attention of a tile for few rows, as in a decode step. Keys and values are multiplied as they are read, not
// packed. Every lane sums the same terms in the same order as in attention_tile.h: results are bitwise identical.
#pragma once

#include "attention_stream.h"
#include "attention_tile.h"

namespace kvasir {

constexpr int FEW = 4;
constexpr int WIDEST = 256;

// Returns whether the functions here apply: at most FEW rows, and heads of whole registers up to WIDEST numbers.
template <typename T>
bool is_few(int rows, int size) {
    return Arithmetic<T>::IS_READ && rows <= FEW && size <= WIDEST && size % (LANES * Arithmetic<T>::PER_TERM) == 0;
}

// Returns the address of a token's numbers. Returns zeros if `at` is negative: no row of the task sees the token.
template <typename T>
const T* numbers_of(const T* pool, int64_t at) {
    alignas(64) static const T nothing[WIDEST] = {};
    return at < 0 ? nothing : pool + at;
}

// Computes products[row][token] of M rows of queries and sixteen keys.
template <int M, typename T>
void multiply_keys(const typename Arithmetic<T>::Term* queries, const T* keys, const int64_t* at, int size,
                   float* products, Stream<T>& ahead) {
    using A = Arithmetic<T>;
    const int num_terms = size / A::PER_TERM;
    using Row = typename A::Row;
    const Row* rows[LANES];
    Lanes sums[M];
    for (int row = 0; row < LANES; ++row) rows[row] = reinterpret_cast<const Row*>(numbers_of(keys, at[row]));
    for (int m = 0; m < M; ++m) sums[m] = zeros();
    for (int term = 0; term < num_terms; term += A::AT_ONCE) {
        Lanes columns[A::AT_ONCE];
        ahead.template ask<4 * LINE>();
        transpose(rows, term, columns);
        for (int n = 0; n < A::AT_ONCE; ++n) {
            for (int m = 0; m < M; ++m) {
                sums[m] = A::multiply_add(A::splat_term(queries + m * num_terms + term + n), columns[n], sums[m]);
            }
        }
    }
    for (int m = 0; m < M; ++m) store(products + m * TILE, sums[m]);
}

// sums[row] = factors[row] * sums[row] + the weights of M rows times the tokens' values. factors null: all 1.
template <int M, typename T>
void multiply_values(const typename Arithmetic<T>::Term* weights, const T* values, const int64_t* at, int num_tokens,
                     int size, float* sums, const float* factors, Stream<T>& ahead) {
    using A = Arithmetic<T>;
    constexpr int stride = TILE / A::PER_TERM, N = A::VALUE_COLUMNS;
    for (int offset = 0; offset < size; offset += N * LANES) {
        const int columns = std::min(N, (size - offset) / LANES);
        Lanes block[M][N];
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n) {
                block[m][n] = n < columns ? load(sums + m * size + offset + n * LANES) : zeros();
                if (factors != nullptr) block[m][n] = mul(block[m][n], splat(factors[m]));
            }
        }
        for (int token = 0; token < num_tokens; token += A::PER_TERM) {
            ahead.template ask<N * LANES * A::PER_TERM * static_cast<int>(sizeof(T))>();
            Lanes row[N];
            A::load_terms(values, at + token, offset, columns, row);
            for (int m = 0; m < M; ++m) {
                const Lanes weight = A::splat_term(weights + m * stride + token / A::PER_TERM);
                for (int n = 0; n < N; ++n) block[m][n] = A::multiply_add(weight, row[n], block[m][n]);
            }
        }
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < columns; ++n) store(sums + m * size + offset + n * LANES, block[m][n]);
        }
    }
}

// Calls work with the number of rows (1 to FEW) as a std::integral_constant.
template <typename Work>
void with_rows(int rows, const Work& work) {
    switch (rows) {
        case 1: work(std::integral_constant<int, 1>{}); break;
        case 2: work(std::integral_constant<int, 2>{}); break;
        case 3: work(std::integral_constant<int, 3>{}); break;
        default: work(std::integral_constant<int, FEW>{});
    }
}

}  // namespace kvasir
