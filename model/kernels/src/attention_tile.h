// Attention of one tile: TILE keys and values, for some rows of queries.
//
// Every score and every output is one lane that sums its terms from first to last, for any number of rows. Many rows
// share a packed copy of keys and values. Few rows, as in a decode step, multiply keys and values as they are read.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace kvasir {

constexpr int TILE = 128;
constexpr int GROUPS = TILE / LANES;
constexpr int FEW_ROWS = 8;
constexpr int MAX_HEAD_SIZE = 512;
constexpr int CACHE_LINE = 64;                  // bytes
constexpr int PREFETCH_DISTANCE = 48 * 1024;    // bytes between a read and the prefetch
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int ROWS = 6, COLUMNS = 4;  // accumulators take 24 of 32 registers
#else
constexpr int ROWS = 6, COLUMNS = 1;  // accumulators take 12 of 16 registers, two each
#endif

inline int groups_of(int num_tokens) { return (num_tokens + LANES - 1) / LANES; }
inline int round_up(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// Arithmetic of cache type T, computed in float. Term: operand of one step of a sum, PER_TERM numbers of one row.
template <typename T>
struct Widened {
    using Term = float;
    using Transposed = T;  // type by which rows of keys are transposed: one number for each term
    static constexpr int PER_TERM = 1;
    static constexpr int VALUES_AT_ONCE = sizeof(T) <= 2 ? 16 : 4;  // tokens that few rows multiply together

    static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return fma(a, b, c); }
    static Lanes splat_term(const Term* term) { return splat(*term); }
    // Loads numbers `offset` to `offset` + 31 of PER_TERM tokens into two registers. Numbers from `size` on are zero.
    static void load_values(const T* const* tokens, int offset, int size, Lanes (&registers)[2]) {
        for (Lanes& some : registers) {
            some = size > offset ? load_up_to(tokens[0] + offset, size - offset) : zeros();
            offset += LANES;
        }
    }
    static Lanes exp2_of(Lanes x) { return exp2(x); }
    static void store_weights(Term* to, Lanes weights) { store(to, weights); }
};

#if defined(__AVX512BF16__)

// Arithmetic of bfloat16 by the CPU's dot product: two numbers for each step, summed in float.
struct Pairs {
    using Term = uint32_t;
    using Transposed = float;
    static constexpr int PER_TERM = 2, VALUES_AT_ONCE = 16;

    static Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
        return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
    }
    static Lanes splat_term(const Term* term) {
        return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*term)))};
    }
    // As Widened::load_values. A lane holds one number of the first token, then the same number of the second token.
    static void load_values(const bf16* const* tokens, int offset, int size, Lanes (&registers)[2]) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                             39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        const int count = std::clamp(size - offset, 0, 2 * LANES);
        const __mmask32 mask = count == 2 * LANES ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
        const __m512i first = _mm512_maskz_loadu_epi16(mask, tokens[0] + offset);
        const __m512i second = _mm512_maskz_loadu_epi16(mask, tokens[1] + offset);
        registers[0].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, low, second));
        registers[1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, high, second));
    }
    // As exp2, with a relative error of 1e-4: a twentieth of the rounding to bfloat16.
    static Lanes exp2_of(Lanes x) {
        const Lanes bounded = max(splat(-126.f), x), n = round(bounded), rest = sub(bounded, n);
        Lanes power = splat(5.50089297e-02f);
        for (float coefficient : {2.42210972e-01f, 6.93282929e-01f, 1.f}) power = fma(power, rest, splat(coefficient));
        const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
        return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(power.v), exponent))};
    }
    static void store_weights(Term* to, Lanes weights) { store(reinterpret_cast<bf16*>(to), weights); }
};

template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, bf16>, Pairs, Widened<T>>;

#else

template <typename T>
using Arithmetic = Widened<T>;

#endif

inline Lanes load_term(const float* from) { return load(from); }
inline Lanes load_term(const uint32_t* from) { return load(reinterpret_cast<const float*>(from)); }
inline void store_term(float* to, Lanes x) { store(to, x); }
inline void store_term(uint32_t* to, Lanes x) { store(reinterpret_cast<float*>(to), x); }

// Returns the address of a token's numbers; zeros if `offset` is negative: no row of the task sees the token.
template <typename T>
const T* numbers_of(const T* pool, int64_t offset) {
    alignas(64) static const T nothing[MAX_HEAD_SIZE] = {};
    return offset < 0 ? nothing : pool + offset;
}

// Prefetcher of the next tile while many rows compute the present tile. at: offset of each token in keys and values, in
// numbers; -1 for tokens that no row sees. A CPU stalls on many prefetches at once, or drops them.
template <typename T>
struct TilePrefetcher {
    const T *keys, *values;
    const int64_t* at;
    int token, end_token, size, offset;

    // Always inlined: GCC treats a function that only prefetches as one without effects, and removes its calls.
    __attribute__((always_inline)) inline void prefetch() {
        if (token >= end_token) return;
        constexpr int line = CACHE_LINE / static_cast<int>(sizeof(T));
        if (const int64_t from = at[token]; from >= 0) {
            for (int number = 0; number < 2; ++number) {
                __builtin_prefetch(keys + from + offset + number * line, 0, 3);
                __builtin_prefetch(values + from + offset + number * line, 0, 3);
            }
        }
        offset += 2 * line;
        if (offset < size) return;
        offset = 0;
        ++token;
    }
};

// The keys or the values of a tile for a task's heads. next: the span that is read after this span. next_at: the tokens
// of the next tile. Their first lines are prefetched early, and into L1: Zen 4 drops a prefetch into L2 if the TLB
// does not have its page.
template <typename T>
struct Span {
    const T* pool = nullptr;
    const int64_t *at = nullptr, *next_at = nullptr;
    int num_tokens = 0, size = 0;
    const Span* next = nullptr;
};

// Prefetcher of keys and values for few rows, in memory order and PREFETCH_DISTANCE ahead of the reads. Prefetches into
// L2, because a Zen 4 core has at most 24 outstanding reads into L1. Stops after the last span until another span is
// linked to it.
template <typename T>
class SpanPrefetcher {
public:
    void begin(const Span<T>* first) {
        span = first;
        token = offset = 0;
        for (int bytes = 0; bytes < PREFETCH_DISTANCE; bytes += 4 * CACHE_LINE) prefetch<4 * CACHE_LINE>();
    }

    // Prefetches the next BYTES, across tokens and spans. Always inlined, see TilePrefetcher.
    template <int BYTES>
    __attribute__((always_inline)) inline void prefetch() {
        for (int byte = 0; byte < BYTES && token < span->num_tokens; byte += CACHE_LINE) {
            if (const int64_t from = span->at[token]; from >= 0) __builtin_prefetch(span->pool + from + offset, 0, 2);
            offset += CACHE_LINE / static_cast<int>(sizeof(T));
            if (offset >= span->size) next_token();
        }
    }

private:
    const Span<T>* span = nullptr;
    int token = 0, offset = 0;

    void next_token() {
        offset = 0;
        if (span->next_at != nullptr && span->next_at[token] >= 0) {
            __builtin_prefetch(span->pool + span->next_at[token], 0, 3);
        }
        if (++token < span->num_tokens || span->next == nullptr) return;
        span = span->next;
        token = 0;
    }
};

// Packs keys as columns: packed[term][token], TILE tokens a row. at: offset of each token in keys, in numbers.
template <typename T>
void pack_keys(const T* keys, const int64_t* at, int num_groups, int size, typename Arithmetic<T>::Term* packed,
               TilePrefetcher<T>& prefetcher) {
    using A = Arithmetic<T>;
    using Transposed = typename A::Transposed;
    const bool is_whole = size % (4 * A::PER_TERM) == 0;
    for (int group = 0; group < num_groups; ++group, at += LANES, packed += LANES) {
        T padded[LANES][MAX_HEAD_SIZE];
        const Transposed* rows[LANES];
        for (int row = 0; row < LANES; ++row) {
            const T* numbers = numbers_of(keys, at[row]);
            if (!is_whole) {
                std::fill(std::copy(numbers, numbers + size, padded[row]), padded[row] + round_up(size, 8), T{});
                numbers = padded[row];
            }
            rows[row] = reinterpret_cast<const Transposed*>(numbers);
        }
        for (int term = 0; term * A::PER_TERM < size; term += 4) {
            if (term % 8 == 0) prefetcher.prefetch();
            Lanes columns[4];
            transpose(rows, term, columns);
            for (int n = 0; n < 4; ++n) store_term(packed + (term + n) * TILE, columns[n]);
        }
    }
}

// Packs values as rows: packed[term][number], width numbers a row, zeros from size on.
template <typename T>
void pack_values(const T* values, const int64_t* at, int num_tokens, int size, int width,
                 typename Arithmetic<T>::Term* packed, TilePrefetcher<T>& prefetcher) {
    using A = Arithmetic<T>;
    for (int token = 0; token < num_tokens; token += A::PER_TERM, packed += width) {
        const T* tokens[A::PER_TERM];
        for (int n = 0; n < A::PER_TERM; ++n) tokens[n] = numbers_of(values, at[token + n]);
        if (token % 4 == 0) prefetcher.prefetch();
        for (int offset = 0; offset < width; offset += 2 * LANES) {
            Lanes registers[2];
            A::load_values(tokens, offset, size, registers);
            store_term(packed + offset, registers[0]);
            if (offset + LANES < width) store_term(packed + offset + LANES, registers[1]);
        }
    }
}

// Computes sums = factors[row] * sums + a * b for M rows and N columns of 16 lanes. factors null: sums start at zero.
template <typename A, int M, int N, typename Prefetcher>
void multiply_block(const typename A::Term* a, int a_stride, const typename A::Term* b, int b_stride, int num_terms,
                    float* sums, int stride, const float* factors, Prefetcher& prefetcher) {
    Lanes block[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            block[m][n] = factors == nullptr ? zeros() : mul(load(sums + m * stride + n * LANES), splat(factors[m]));
        }
    }
    for (int term = 0; term < num_terms; ++term, b += b_stride) {
        if (term % 2 == 0) prefetcher.prefetch();
        Lanes row[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) row[n] = load_term(b + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Lanes left = A::splat_term(a + m * a_stride + term);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) block[m][n] = A::multiply_add(left, row[n], block[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + m * stride + n * LANES, block[m][n]);
    }
}

// Computes multiply_block for num_rows rows and num_columns columns of 16 lanes.
template <typename A, typename Prefetcher>
void multiply(const typename A::Term* a, int a_stride, int num_rows, const typename A::Term* b, int b_stride,
              int num_terms, float* sums, int stride, int num_columns, const float* factors, Prefetcher& prefetcher) {
    for (; num_rows > 0; num_rows -= ROWS, a += ROWS * a_stride, sums += ROWS * stride) {
        with_rows<ROWS>(std::min(num_rows, ROWS), [&](auto m) {
            constexpr int M = decltype(m)::value;
            int column = 0;
            for (; column + COLUMNS <= num_columns; column += COLUMNS) {
                multiply_block<A, M, COLUMNS>(a, a_stride, b + column * LANES, b_stride, num_terms,
                                              sums + column * LANES, stride, factors, prefetcher);
            }
            for (; column < num_columns; ++column) {
                multiply_block<A, M, 1>(a, a_stride, b + column * LANES, b_stride, num_terms, sums + column * LANES,
                                        stride, factors, prefetcher);
            }
        });
        if (factors != nullptr) factors += ROWS;
    }
}

// Computes products[row][token] of M rows of queries and sixteen keys, without packing.
template <int M, typename T>
void multiply_keys(const typename Arithmetic<T>::Term* queries, const T* keys, const int64_t* at, int size,
                   float* products, SpanPrefetcher<T>& prefetcher) {
    using A = Arithmetic<T>;
    using Transposed = typename A::Transposed;
    const int num_terms = size / A::PER_TERM;
    const Transposed* rows[LANES];
    Lanes sums[M];
    for (int row = 0; row < LANES; ++row) rows[row] = reinterpret_cast<const Transposed*>(numbers_of(keys, at[row]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m] = zeros();
    constexpr int AT_ONCE = sizeof(T) == 1 ? LANES : 4;
    for (int term = 0; term < num_terms; term += AT_ONCE) {
        Lanes columns[AT_ONCE];
        prefetcher.template prefetch<AT_ONCE * LANES * static_cast<int>(sizeof(Transposed))>();
        transpose(rows, term, columns);
#pragma GCC unroll 16
        for (int n = 0; n < AT_ONCE; ++n) {
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                sums[m] = A::multiply_add(A::splat_term(queries + m * num_terms + term + n), columns[n], sums[m]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store(products + m * TILE, sums[m]);
}

// Computes N columns of multiply_values, from number `offset` on.
template <int M, int N, typename T>
void multiply_value_columns(const typename Arithmetic<T>::Term* weights, const T* values, const int64_t* at,
                            int num_tokens, int size, int offset, float* sums, const float* factors,
                            SpanPrefetcher<T>& prefetcher) {
    using A = Arithmetic<T>;
    constexpr int stride = TILE / A::PER_TERM;
    Lanes block[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            block[m][n] = load(sums + m * size + offset + n * LANES);
            if (factors != nullptr) block[m][n] = mul(block[m][n], splat(factors[m]));
        }
    }
    for (int token = 0; token < num_tokens; token += A::PER_TERM) {
        prefetcher.template prefetch<N * LANES * A::PER_TERM * static_cast<int>(sizeof(T))>();
        const T* tokens[A::PER_TERM];
        for (int n = 0; n < A::PER_TERM; ++n) tokens[n] = numbers_of(values, at[token + n]) + offset;
        Lanes row[(N + 1) / 2][2];
#pragma GCC unroll 8
        for (int n = 0; n < N; n += 2) A::load_values(tokens, n * LANES, N * LANES, row[n / 2]);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Lanes weight = A::splat_term(weights + m * stride + token / A::PER_TERM);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) block[m][n] = A::multiply_add(weight, row[n / 2][n % 2], block[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + m * size + offset + n * LANES, block[m][n]);
    }
}

// Computes sums[row] = factors[row] * sums[row] + the weights of M rows times the tokens' values, without packing.
// factors null: all 1.
template <int M, typename T>
void multiply_values(const typename Arithmetic<T>::Term* weights, const T* values, const int64_t* at, int num_tokens,
                     int size, float* sums, const float* factors, SpanPrefetcher<T>& prefetcher) {
    int offset = 0;
    const auto multiply_columns = [&](auto n) {
        constexpr int N = decltype(n)::value;
        multiply_value_columns<M, N>(weights, values, at, num_tokens, size, offset, sums, factors, prefetcher);
        offset += N * LANES;
    };
    // More sums than registers would be spilled for each token.
    constexpr int MOST = COLUMNS > 1 ? (M > ROWS ? 2 : COLUMNS) : (M > 2 ? 1 : 2);
    if constexpr (COLUMNS == 4 && M <= 4) {  // heads of 80 and 96
        if (size == 5 * LANES) multiply_columns(std::integral_constant<int, 5>{});
        if (size == 6 * LANES) multiply_columns(std::integral_constant<int, 6>{});
    }
    while (size - offset >= MOST * LANES) multiply_columns(std::integral_constant<int, MOST>{});
    if constexpr (MOST > 1) {
        while (size - offset >= 2 * LANES) multiply_columns(std::integral_constant<int, 2>{});
    }
    while (offset < size) multiply_columns(std::integral_constant<int, 1>{});
}

inline float exp2(float x) {
    float powers[LANES];
    store(powers, exp2(splat(x)));
    return powers[0];
}

// Softmax state of one row. largest: the largest score so far, as an exponent of 2. total: sum of 2^(score - largest).
struct Softmax {
    float largest = MINUS_INFINITY;
    float total = 0;
};

// Range of a tile's tokens that a row sees.
struct Visible {
    int first, end;

    // Replaces the lanes of a group of tokens that the row does not see.
    Lanes mask(int group, Lanes x, float by) const {
        const int from = std::clamp(first - group * LANES, 0, LANES), to = std::clamp(end - group * LANES, from, LANES);
        return to - from < LANES ? select(from, to, x, splat(by)) : x;
    }
};

// Turns the products of one row into scores, scale * product + bias, unless the row is whole: it sees all tokens of the
// tile and has no bias. Products without a bias stay unscaled. Updates the row's largest score, and returns the factor by
// which the row's earlier sums must be multiplied.
template <bool IS_WHOLE>
inline float update_largest(float* products, int num_groups, Visible visible, float scale, const float* bias,
                            Softmax& row) {
    Lanes most = splat(MINUS_INFINITY);
    for (int group = 0; group < num_groups; ++group) {
        Lanes score = load(products + group * LANES);
        if constexpr (!IS_WHOLE) {
            if (bias != nullptr) score = fma(score, splat(scale), load(bias + group * LANES));
            score = visible.mask(group, score, MINUS_INFINITY);
            store(products + group * LANES, score);
        }
        most = max(most, score);
    }
    const float before = row.largest;
    row.largest = std::max(before, largest(most) * (bias == nullptr ? scale : 1.f));
    // No branch on a new largest score, which a CPU cannot predict. The sums of a row without earlier keys are 0.
    return row.largest == MINUS_INFINITY ? 1.f : exp2(before - row.largest);
}

// Turns the scores of one row into weights 2^(scale * score - largest), and adds them to the row's total. Tokens that the
// row does not see get weight 0.
template <typename A, bool IS_WHOLE>
inline void compute_weights(const float* scores, int num_groups, Visible visible, float scale, float factor, Softmax& row,
                            typename A::Term* weights) {
    const Lanes shift = splat(-row.largest);
    Lanes total = zeros();
    for (int group = 0; group < num_groups; ++group) {
        Lanes weight = A::exp2_of(fma(load(scores + group * LANES), splat(scale), shift));
        if constexpr (!IS_WHOLE) weight = visible.mask(group, weight, 0);
        total = add(total, weight);
        A::store_weights(weights + group * (LANES / A::PER_TERM), weight);
    }
    row.total = row.total * factor + sum(total);
}

// Multiplies the weights of tokens by the tokens' scales. Weights of tokens that the row does not see stay 0.
inline void scale_weights(const float* scales, int num_groups, Visible visible, float* weights) {
    for (int group = 0; group < num_groups; ++group, weights += LANES, scales += LANES) {
        store(weights, visible.mask(group, mul(load(weights), load(scales)), 0));
    }
}

}  // namespace kvasir
