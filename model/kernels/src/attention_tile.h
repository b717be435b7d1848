// Attention of one tile: TILE keys and values of one key/value head, for some rows of queries.
//
// The tile is packed once for all rows, in the order in which the products read it: keys as columns, values as rows.
// Every score and every output is one lane that sums its terms from first to last. Results are bitwise identical for
// any number of rows, and for any keys after the context in the same tile.
#pragma once

#include <algorithm>
#include <limits>

#include "half_precision.h"

namespace kvasir {

constexpr int TILE = 64;
constexpr int GROUPS = TILE / LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int ROWS = 6, COLUMNS = 4;  // accumulators take 24 of 32 registers
#elif defined(__AVX2__)
constexpr int ROWS = 2, COLUMNS = 2;  // accumulators take 8 of 16 registers, two each
#else
constexpr int ROWS = 2, COLUMNS = 1;
#endif

inline int round_up(int count, int of) { return (count + of - 1) / of * of; }

inline Lanes load_term(const float* from) { return load(from); }
inline Lanes load_term(const uint32_t* from) { return load(reinterpret_cast<const float*>(from)); }
inline void store_term(float* to, Lanes x) { store(to, x); }
inline void store_term(uint32_t* to, Lanes x) { store(reinterpret_cast<float*>(to), x); }

// Arithmetic of cache type T, computed in float. Term: operand of one step of a sum, PER_TERM numbers of one row.
template <typename T>
struct Widened {
    using Term = float;
    static constexpr int PER_TERM = 1;
    // IS_READ: whether rows can be transposed directly from the cache. If so, as type Row, AT_ONCE terms at a time.
    static constexpr bool IS_READ = !std::is_same_v<T, bf16>;
    using Row = std::conditional_t<std::is_same_v<T, half>, half, float>;
    static constexpr int AT_ONCE = std::is_same_v<T, half> ? 8 : 4;
    // For attention_few_queries.h: tokens processed together, and registers for each token.
    static constexpr int VALUES_AT_ONCE = std::is_same_v<T, half> ? 16 : 4, VALUE_COLUMNS = COLUMNS > 2 ? 4 : 2;

    static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return fma(a, b, c); }
    static Lanes splat_term(const Term* term) { return splat(*term); }
    // Returns sixteen terms: the row itself if it can be used directly, else a copy in room, with zeros from count on.
    static const float* terms_of(const T* row, int count, float* room) {
        if constexpr (std::is_same_v<T, float>) {
            if (row != nullptr && count >= LANES) return row;
        }
        store(room, row == nullptr ? zeros() : count >= LANES ? load(row) : load(row, count));
        return room;
    }
    // Packs the values of one token. A null token, which no row sees, becomes zeros.
    static void pack_terms(const T* const* tokens, int size, Term* packed) {
        for (int offset = 0; offset < size; offset += LANES) {
            const bool is_whole = size - offset >= LANES;
            const T* from = tokens[0] + offset;
            store(packed + offset, tokens[0] == nullptr ? zeros() : is_whole ? load(from) : load(from, size - offset));
        }
    }
    // Loads 16 * columns values into registers, as pack_terms packs them.
    static void load_terms(const T* pool, const int64_t* at, int offset, int columns, Lanes (&row)[VALUE_COLUMNS]) {
        for (int n = 0; n < VALUE_COLUMNS; ++n) {
            row[n] = *at < 0 || n >= columns ? zeros() : load(pool + *at + offset + n * LANES);
        }
    }
    static void store_weights(Term* to, Lanes weights) { store(to, weights); }
    static void store_output(T* to, Lanes x, int count) {
        float buffer[LANES];
        store(buffer, x);
        put(buffer, count, to);
    }
};

#if defined(__AVX512BF16__)

// Arithmetic of bfloat16 by the CPU's dot product: two numbers per step, summed in float.
struct Pairs {
    using Term = uint32_t;
    static constexpr int PER_TERM = 2;
    static constexpr bool IS_READ = true;
    using Row = float;
    static constexpr int AT_ONCE = 4, VALUES_AT_ONCE = 16, VALUE_COLUMNS = 4;

    static Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
        return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
    }
    static Lanes splat_term(const Term* term) {
        return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*term)))};
    }
    // As Widened::terms_of. count is in numbers, not terms.
    static const float* terms_of(const bf16* row, int count, float* room) {
        if (row != nullptr && count >= 2 * LANES) return reinterpret_cast<const float*>(row);
        store(room, zeros());
        if (row != nullptr) std::memcpy(room, row, static_cast<size_t>(count) * sizeof(bf16));
        return room;
    }
    // Interleaves the numbers of two tokens: first gets the first sixteen pairs, last the last sixteen.
    static void interleave(__m512i a, __m512i b, Lanes& first, Lanes& last) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                             39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        first.v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
        last.v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
    }
    // Packs the values of two tokens. A null token, which no row sees, becomes zeros.
    static void pack_terms(const bf16* const* tokens, int size, Term* packed) {
        for (int offset = 0; offset < size; offset += 2 * LANES) {
            const int count = std::min(size - offset, 2 * LANES);
            const __mmask32 mask = count == 2 * LANES ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
            auto numbers = [&](const bf16* token) {
                return token == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, token + offset);
            };
            Lanes first, last;
            interleave(numbers(tokens[0]), numbers(tokens[1]), first, last);
            store_term(packed + offset, first);
            if (count > LANES) store_term(packed + offset + LANES, last);
        }
    }
    // Loads 16 * columns values into registers, as pack_terms packs them.
    static void load_terms(const bf16* pool, const int64_t* at, int offset, int columns, Lanes (&row)[VALUE_COLUMNS]) {
        auto numbers = [&](int token, int n) {
            return at[token] < 0 || n >= columns ? _mm512_setzero_si512()
                                                 : _mm512_loadu_si512(pool + at[token] + offset + n * LANES);
        };
        for (int n = 0; n < 4; n += 2) interleave(numbers(0, n), numbers(1, n), row[n], row[n + 1]);
    }
    static void store_weights(Term* to, Lanes weights) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weights.v)));
    }
    static void store_output(bf16* to, Lanes x, int count) {
        const auto mask = static_cast<__mmask16>(count >= LANES ? 0xffff : (1u << count) - 1);
        _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
    }
};

template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, bf16>, Pairs, Widened<T>>;

#else

template <typename T>
using Arithmetic = Widened<T>;

#endif

// Prefetcher of the keys and values that are packed next. at: offset of each token in keys and values, in numbers; -1
// for tokens that no row sees. Prefetches are spread evenly over the computation of the present tile. A processor
// stalls on many prefetches at once, or drops them.
template <typename T>
struct Ahead {
    const T *keys, *values;
    const int64_t* at;
    int token, end_token, size, offset;

    // Always inlined: GCC treats a function that only prefetches as one without effects, and removes its calls.
    __attribute__((always_inline)) inline void ask() {
        if (token >= end_token) return;
        constexpr int line = 64 / static_cast<int>(sizeof(T));
        if (const int64_t from = at[token]; from >= 0) {
            for (int number = 0; number < 2; ++number) {
                __builtin_prefetch(keys + from + offset + number * line, 0, 3);
                __builtin_prefetch(values + from + offset + number * line, 0, 3);
            }
        }
        offset += 2 * line;
        if (offset >= size) {
            offset = 0;
            ++token;
        }
    }
};

// Packs keys as columns: packed[term][token], TILE tokens a row. at: offset of each token in keys, in
// numbers; -1: zeros.
template <typename T>
void pack_keys(const T* keys, const int64_t* at, int num_groups, int size, typename Arithmetic<T>::Term* packed,
               Ahead<T>& ahead) {
    using A = Arithmetic<T>;
    constexpr int step = LANES * A::PER_TERM;
    for (int group = 0; group < num_groups; ++group, at += LANES, packed += LANES) {
        int64_t signs = 0;
        for (int row = 0; row < LANES; ++row) signs |= at[row];
        if (A::IS_READ && signs >= 0 && size % step == 0) {
            const typename A::Row* rows[LANES];
            for (int row = 0; row < LANES; ++row) rows[row] = reinterpret_cast<const typename A::Row*>(keys + at[row]);
            for (int term = 0; term * A::PER_TERM < size; term += A::AT_ONCE) {
                if (term % 8 == 0) ahead.ask();
                Lanes columns[A::AT_ONCE];
                transpose(rows, term, columns);
                for (int n = 0; n < A::AT_ONCE; ++n) store_term(packed + (term + n) * TILE, columns[n]);
            }
            continue;
        }
        for (int offset = 0; offset < size; offset += step) {
            float room[LANES][LANES];
            const float* rows[LANES];
            for (int row = 0; row < LANES; ++row) {
                rows[row] = A::terms_of(at[row] < 0 ? nullptr : keys + at[row] + offset, size - offset, room[row]);
            }
            for (int quarter = 0; quarter < LANES; quarter += 4) {
                if (quarter % 8 == 0) ahead.ask();
                const int term = offset / A::PER_TERM + quarter;
                if (term * A::PER_TERM >= size) break;
                Lanes columns[4];
                transpose(rows, quarter, columns);
                for (int n = 0; n < 4; ++n) store_term(packed + (term + n) * TILE, columns[n]);
            }
        }
    }
}

// Packs values as rows: packed[term][number], width numbers a row, zeros from size on.
template <typename T>
void pack_values(const T* values, const int64_t* at, int num_tokens, int size, int width,
                 typename Arithmetic<T>::Term* packed, Ahead<T>& ahead) {
    using A = Arithmetic<T>;
    for (int token = 0; token < num_tokens; token += A::PER_TERM, packed += width) {
        const T* tokens[A::PER_TERM];
        for (int term = 0; term < A::PER_TERM; ++term) {
            tokens[term] = at[token + term] < 0 ? nullptr : values + at[token + term];
        }
        if (token % 4 == 0) ahead.ask();
        A::pack_terms(tokens, size, packed);
    }
}

// Computes sums = factors[row] * sums + a * b for M rows and N columns of 16 lanes, terms added from first to last. If
// factors is null, the sums start at zero.
template <typename A, int M, int N, typename Next>
void multiply_block(const typename A::Term* a, int a_stride, const typename A::Term* b, int b_stride, int num_terms,
                    float* sums, int stride, const float* factors, Next& ahead) {
    Lanes block[M][N];
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) {
            block[m][n] = factors == nullptr ? zeros() : mul(load(sums + m * stride + n * LANES), splat(factors[m]));
        }
    }
    for (int term = 0; term < num_terms; ++term, b += b_stride) {
        if (term % 2 == 0) ahead.ask();
        Lanes row[N];
        for (int n = 0; n < N; ++n) row[n] = load_term(b + n * LANES);
        for (int m = 0; m < M; ++m) {
            const Lanes left = A::splat_term(a + m * a_stride + term);
            for (int n = 0; n < N; ++n) block[m][n] = A::multiply_add(left, row[n], block[m][n]);
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) store(sums + m * stride + n * LANES, block[m][n]);
    }
}

template <typename A, int M, typename Next>
void multiply_rows(const typename A::Term* a, int a_stride, const typename A::Term* b, int b_stride, int num_terms,
                   float* sums, int stride, int num_columns, const float* factors, Next& ahead) {
    int column = 0;
    for (; column + COLUMNS <= num_columns; column += COLUMNS) {
        multiply_block<A, M, COLUMNS>(a, a_stride, b + column * LANES, b_stride, num_terms, sums + column * LANES,
                                      stride, factors, ahead);
    }
    for (; column < num_columns; ++column) {
        multiply_block<A, M, 1>(a, a_stride, b + column * LANES, b_stride, num_terms, sums + column * LANES, stride,
                                factors, ahead);
    }
}

// Computes multiply_block for num_rows rows and num_columns columns of 16 lanes.
template <typename A, typename Next>
void multiply(const typename A::Term* a, int a_stride, int num_rows, const typename A::Term* b, int b_stride,
              int num_terms, float* sums, int stride, int num_columns, const float* factors, Next& ahead) {
    while (num_rows > 0) {
        const int rows = std::min(num_rows, ROWS);
        auto some = [&](auto m) {
            multiply_rows<A, decltype(m)::value>(a, a_stride, b, b_stride, num_terms, sums, stride, num_columns,
                                                 factors, ahead);
        };
        switch (rows) {
            case 1: some(std::integral_constant<int, 1>{}); break;
            case 2: some(std::integral_constant<int, 2>{}); break;
#if defined(__AVX512F__)
            case 3: some(std::integral_constant<int, 3>{}); break;
            case 4: some(std::integral_constant<int, 4>{}); break;
            case 5: some(std::integral_constant<int, 5>{}); break;
            case 6: some(std::integral_constant<int, 6>{}); break;
#endif
        }
        a += rows * a_stride;
        sums += rows * stride;
        if (factors != nullptr) factors += rows;
        num_rows -= rows;
    }
}

inline float exp2(float x) {
    float powers[LANES];
    store(powers, exp2(splat(x)));
    return powers[0];
}

// Softmax state of one row. largest: the largest score so far, as an exponent of 2. total: sum of 2^(score - largest).
struct Softmax {
    float largest = NOTHING;
    float total = 0;
};

// Implementation of weigh. IS_WHOLE: all tokens of the tile are seen and there is no bias, so masking is skipped.
template <typename A, bool IS_WHOLE>
inline float weigh_groups(const float* products, int num_groups, int first, int end, float scale, const float* bias,
                          Softmax& row, typename A::Term* weights) {
    const auto is_edge = [&](int group, int& from, int& to) {
        from = std::clamp(first - group * LANES, 0, LANES), to = std::clamp(end - group * LANES, from, LANES);
        return to - from < LANES;
    };
    if constexpr (IS_WHOLE) num_groups = GROUPS;
    Lanes scores[GROUPS], most = splat(NOTHING);
    int from, to;
    for (int group = 0; group < num_groups; ++group) {
        Lanes score = mul(load(products + group * LANES), splat(scale));
        if (!IS_WHOLE && bias != nullptr) score = add(score, load(bias + group * LANES));
        if (!IS_WHOLE && is_edge(group, from, to)) score = select(from, to, score, splat(NOTHING));
        scores[group] = score;
        most = max(most, score);
    }
    const float before = row.largest;
    row.largest = std::max(before, largest(most));
    Lanes total = zeros();
    for (int group = 0; group < num_groups; ++group) {
        Lanes weight = exp2(sub(scores[group], splat(row.largest)));
        if (!IS_WHOLE && is_edge(group, from, to)) weight = select(from, to, weight, zeros());
        total = add(total, weight);
        A::store_weights(weights + group * (LANES / A::PER_TERM), weight);
    }
    const float factor = before == row.largest ? 1.f : before == NOTHING ? 0.f : exp2(before - row.largest);
    row.total = row.total * factor + sum(total);
    return factor;
}

// Turns the products of one row into weights 2^(scale * product + bias - largest). Tokens from first to end - 1 are
// seen; other tokens get weight 0. Returns the factor by which the row's earlier sums must be multiplied.
template <typename A>
float weigh(const float* products, int num_groups, int first, int end, float scale, const float* bias, Softmax& row,
            typename A::Term* weights) {
    const bool is_whole = first == 0 && end == TILE && bias == nullptr;
    return (is_whole ? weigh_groups<A, true> : weigh_groups<A, false>)(products, num_groups, first, end, scale, bias, row,
                                                                      weights);
}

}  // namespace kvasir
