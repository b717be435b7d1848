// A tile against few rows, as in a step of decodes: products are made while keys and values are read, and nothing is
// packed. Every lane sums over the same terms in the same order as in attention_tile.h: the same bits.
#pragma once

#include "attention_tile.h"

namespace kvasir {

constexpr int FEW = 4;
constexpr int WIDEST = 256;

// Whether numbers lie as they are multiplied, in whole registers.
template <typename T>
bool is_few(int rows, int size) {
    return Arithmetic<T>::TERMS_LIE && rows <= FEW && size <= WIDEST && size % (LANES * Arithmetic<T>::PER_TERM) == 0;
}

// Where a token's numbers are; zeros for one that nobody sees.
template <typename T>
const T* numbers_of(const T* pool, int64_t at) {
    alignas(64) static const T nothing[WIDEST] = {};
    return at < 0 ? nothing : pool + at;
}

// products[row][token] of M rows of queries and GROUPS_AT_ONCE times 16 keys: several chains of sums at a time, for one
// waits for itself.
template <int M, int GROUPS_AT_ONCE, typename T>
__attribute__((always_inline)) inline void multiply_groups(const typename Arithmetic<T>::Term* queries, const T* keys,
                                                           const int64_t* at, int size, float* products,
                                                           Ahead<T>& ahead) {
    using A = Arithmetic<T>;
    const int num_terms = size / A::PER_TERM;
    const float* rows[GROUPS_AT_ONCE][LANES];
    Lanes sums[GROUPS_AT_ONCE][M];
    for (int group = 0; group < GROUPS_AT_ONCE; ++group) {
        for (int row = 0; row < LANES; ++row) {
            rows[group][row] = reinterpret_cast<const float*>(numbers_of(keys, at[group * LANES + row]));
        }
        for (int m = 0; m < M; ++m) sums[group][m] = zeros();
    }
    for (int term = 0; term < num_terms; term += 4) {
        Lanes columns[GROUPS_AT_ONCE][4];
        for (int group = 0; group < GROUPS_AT_ONCE; ++group) {
            ahead.ask();
            transpose(rows[group], term, columns[group]);
        }
        for (int n = 0; n < 4; ++n) {
            for (int m = 0; m < M; ++m) {
                const Lanes query = A::splat_term(queries + m * num_terms + term + n);
                for (int group = 0; group < GROUPS_AT_ONCE; ++group) {
                    sums[group][m] = A::multiply_add(query, columns[group][n], sums[group][m]);
                }
            }
        }
    }
    for (int group = 0; group < GROUPS_AT_ONCE; ++group) {
        for (int m = 0; m < M; ++m) store(products + m * TILE + group * LANES, sums[group][m]);
    }
}

template <int M, typename T>
void multiply_keys(const typename Arithmetic<T>::Term* queries, const T* keys, const int64_t* at, int num_groups,
                   int size, float* products, Ahead<T>& ahead) {
    int group = 0;
    for (; group + 2 <= num_groups; group += 2) {
        multiply_groups<M, 2>(queries, keys, at + group * LANES, size, products + group * LANES, ahead);
    }
    if (group < num_groups) multiply_groups<M, 1>(queries, keys, at + group * LANES, size, products + group * LANES, ahead);
}

// sums[row] = factors[row] * sums + weights of M rows times a tile's values.
template <int M, typename T>
void multiply_values(const typename Arithmetic<T>::Term* weights, const T* values, const int64_t* at, int num_tokens,
                     int size, float* sums, const float* factors, Ahead<T>& ahead) {
    using A = Arithmetic<T>;
    constexpr int stride = TILE / A::PER_TERM, N = 2 * A::PER_TERM;
    for (int offset = 0; offset < size; offset += N * LANES) {
        const int columns = std::min(N, (size - offset) / LANES);
        Lanes block[M][N];
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n) {
                block[m][n] = n < columns ? mul(load(sums + m * size + offset + n * LANES), splat(factors[m])) : zeros();
            }
        }
        for (int token = 0; token < num_tokens; token += A::PER_TERM) {
            if (token % 2 == 0) ahead.ask();
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

// Calls work with the number of rows, from 1 to FEW, as a type.
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
