// Products with packed matrices, computed in tiles of rows and outputs. The sums of a tile stay in registers.
#include "grouped.h"

namespace kvasir {
namespace {

constexpr int64_t FETCH_AHEAD = 24;  // prefetch distance, in groups of inputs: covers the latency of memory

inline int32_t load_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Each matrix type stores GROUP adjacent inputs of an output and multiplies a group in PARTS passes.
struct Float32 {
    using Weight = float;
    using Input = float;
    using Sums = Lanes;
    using Spread = Lanes;
    static constexpr int GROUP = 1, PARTS = 1;
    static Sums zero() { return zeros(); }
    static Lanes weights(const Weight* from, int) { return load(from); }
    static Spread spread(const Input* from, int) { return splat(*from); }
    static Sums step(Sums sums, Lanes weights, Spread inputs) { return fma(weights, inputs, sums); }
};

#if defined(KVASIR_BF16_DOT)
struct Bfloat16 {
    using Weight = bf16;
    using Input = Bfloat16Input;
    using Sums = Lanes;
    using Spread = __m512bh;
    static constexpr int GROUP = 2, PARTS = 1;
    static Sums zero() { return zeros(); }
    static __m512bh weights(const Weight* from, int) { return (__m512bh)_mm512_loadu_si512(from); }
    static Spread spread(const Input* from, int) { return (__m512bh)_mm512_set1_epi32(load_word(from)); }
    static Sums step(Sums sums, __m512bh weights, Spread inputs) {
        return {_mm512_dpbf16_ps(sums.v, weights, inputs)};
    }
};
#else
// Without bfloat16 dot products: a shift or a mask widens each half of a pair to float.
struct Bfloat16 {
    using Weight = bf16;
    using Input = Bfloat16Input;
    using Sums = Lanes;
    using Spread = Lanes;
    static constexpr int GROUP = 2, PARTS = 2;
    static Sums zero() { return zeros(); }
    static Lanes weights(const Weight* from, int part) { return load_of_pairs(from, part == 1); }
    static Spread spread(const Input* from, int part) { return splat(from[part]); }
    static Sums step(Sums sums, Lanes weights, Spread inputs) { return fma(weights, inputs, sums); }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
    using Weight = int8_t;
    using Input = uint8_t;
    struct Sums {
        __v16si v;
    };
    using Spread = __m512i;
    static constexpr int GROUP = 4, PARTS = 1;
    static Sums zero() { return {__v16si{}}; }
    static __m512i weights(const Weight* from, int) { return _mm512_loadu_si512(from); }
    static Spread spread(const Input* from, int) { return _mm512_set1_epi32(load_word(from)); }
    static Sums step(Sums sums, __m512i weights, Spread inputs) {
        return {(__v16si)_mm512_dpbusd_epi32((__m512i)sums.v, inputs, weights)};
    }
    static Lanes floats(Sums sums, const int32_t* shift) {
        return {_mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)sums.v, _mm512_loadu_si512(shift)))};
    }
};
#else
struct Int8 {
    using Weight = int8_t;
    using Input = uint8_t;
    struct Sums {
        int32_t v[LANES];
    };
    struct Spread {
        uint8_t v[4];
    };
    static constexpr int GROUP = 4, PARTS = 1;
    static Sums zero() { return {}; }
    static const Weight* weights(const Weight* from, int) { return from; }
    static Spread spread(const Input* from, int) { return {{from[0], from[1], from[2], from[3]}}; }
    static Sums step(Sums sums, const Weight* weights, Spread inputs) {
        for (int lane = 0; lane < LANES; ++lane) {
            for (int input = 0; input < 4; ++input) sums.v[lane] += inputs.v[input] * weights[4 * lane + input];
        }
        return sums;
    }
    static Lanes floats(Sums sums, const int32_t* shift) {
        float buffer[LANES];
        for (int lane = 0; lane < LANES; ++lane) buffer[lane] = static_cast<float>(sums.v[lane] - shift[lane]);
        return load(buffer);
    }
};
#endif

// Converts sums to results: applies the scales (int8 only) and the bias.
template <typename Kind>
inline Lanes finished(typename Kind::Sums sums, const Matrix& matrix, int64_t output, float row_scale) {
    Lanes result;
    if constexpr (Kind::GROUP == 4) {
        result = mul(mul(Kind::floats(sums, matrix.shift + output), splat(row_scale)), load(matrix.scale + output));
    } else {
        result = sums;
    }
    return matrix.bias == nullptr ? result : add(result, load(matrix.bias + output));
}

// Returns the address of the weights of an output.
template <typename Kind>
inline const typename Kind::Weight* weights_of(const Matrix& matrix, int64_t output) {
    const int64_t groups = (matrix.inputs + Kind::GROUP - 1) / Kind::GROUP;
    return static_cast<const typename Kind::Weight*>(matrix.weight) +
           (output / PANEL * groups * PANEL + output % PANEL) * Kind::GROUP;
}

// Prefetch plan of a tile. from: the weights that this thread will probably read next. blocks: number of blocks of
// `from` that the tile prefetches; 0: the tile prefetches its own weights, and near its end the first of `from`.
template <typename Kind>
struct Prefetch {
    const typename Kind::Weight* from;
    int blocks;
};

// Multiplies ROWS rows of inputs with TILE_BLOCKS blocks of outputs and emits the results row by row.
template <typename Kind, int ROWS>
inline void tile(const Matrix& matrix, const typename Kind::Input* x, int64_t stride, const float* scales, int64_t row,
                 int64_t output, Prefetch<Kind> prefetch, Emit emit, const void* work) {
    constexpr int64_t BLOCK = LANES * Kind::GROUP, STEP = PANEL * Kind::GROUP;
    const int64_t groups = (matrix.inputs + Kind::GROUP - 1) / Kind::GROUP;
    const auto* weight = weights_of<Kind>(matrix, output);
    x += row * stride;
    typename Kind::Sums sums[ROWS][TILE_BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int b = 0; b < TILE_BLOCKS; ++b) sums[r][b] = Kind::zero();
    }
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t at = group * STEP;
        // Prefetch into L2, which allows more outstanding reads than L1.
        if (prefetch.blocks > 0) {
            for (int b = 0; b < prefetch.blocks; ++b) __builtin_prefetch(prefetch.from + at + b * BLOCK, 0, 2);
        } else {
            const auto* ahead = group + FETCH_AHEAD < groups ? weight : prefetch.from - groups * STEP;
            for (int b = 0; b < TILE_BLOCKS; ++b) {
                __builtin_prefetch(ahead + at + FETCH_AHEAD * STEP + b * BLOCK, 0, 2);
            }
        }
#pragma GCC unroll 2
        for (int part = 0; part < Kind::PARTS; ++part) {
            decltype(Kind::weights(weight, part)) weights[TILE_BLOCKS];
#pragma GCC unroll 4
            for (int b = 0; b < TILE_BLOCKS; ++b) {
                weights[b] = Kind::weights(weight + at + b * BLOCK, part);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const auto inputs = Kind::spread(x + r * stride + group * Kind::GROUP, part);
#pragma GCC unroll 4
                for (int b = 0; b < TILE_BLOCKS; ++b) sums[r][b] = Kind::step(sums[r][b], weights[b], inputs);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        Lanes results[TILE_BLOCKS];
        const float row_scale = Kind::GROUP == 4 ? scales[row + r] : 1.f;
#pragma GCC unroll 4
        for (int b = 0; b < TILE_BLOCKS; ++b) {
            results[b] = finished<Kind>(sums[r][b], matrix, output + b * LANES, row_scale);
        }
        emit(work, row + r, output, results, TILE_BLOCKS);
    }
}

template <typename Kind>
void multiply_as(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows,
                 int64_t threads, Emit emit, const void* work) {
    const int64_t parts = (rows + TASK_ROWS - 1) / TASK_ROWS;
    const auto* inputs = static_cast<const typename Kind::Input*>(x);
    constexpr int64_t outputs = TILE_BLOCKS * LANES;
    parallel_for(matrix.outputs / PANEL * parts, threads, [&](int64_t task, int) {
        const int64_t panel = task / parts * PANEL, first = task % parts * TASK_ROWS;
        const int64_t end = first + TASK_ROWS < rows ? first + TASK_ROWS : rows;
        // The first tile waits for its weights. The other tiles share the prefetching of the next weights.
        const auto others = static_cast<int>((end - first + TILE_ROWS - 1) / TILE_ROWS - 1);
        const int share = others > 0 ? (TILE_BLOCKS + others - 1) / others : 0;
        for (int64_t output = panel; output < panel + PANEL; output += outputs) {
            const bool is_last = output + outputs == panel + PANEL;
            const auto* next = weights_of<Kind>(matrix, is_last ? panel + threads * PANEL : output + outputs);
            int fetched = -share;
            auto next_prefetch = [&]() -> Prefetch<Kind> {
                const int block = fetched + share <= TILE_BLOCKS ? fetched : TILE_BLOCKS - share;
                fetched += share;
                return block < 0 ? Prefetch<Kind>{next, 0} : Prefetch<Kind>{next + block * LANES * Kind::GROUP, share};
            };
            for (int64_t row = first; row < end; row += TILE_ROWS) {
                with_rows<TILE_ROWS>(static_cast<int>(end - row), [&](auto count) {
                    tile<Kind, decltype(count)::value>(matrix, inputs, stride, scales, row, output, next_prefetch(),
                                                       emit, work);
                });
            }
        }
    });
}

}  // namespace

void multiply(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows, int64_t threads,
              Emit emit, const void* work) {
    switch (matrix.numbers) {
        case Numbers::float32: return multiply_as<Float32>(matrix, x, stride, scales, rows, threads, emit, work);
        case Numbers::bfloat16: return multiply_as<Bfloat16>(matrix, x, stride, scales, rows, threads, emit, work);
        case Numbers::int8: return multiply_as<Int8>(matrix, x, stride, scales, rows, threads, emit, work);
        default: break;
    }
    with_grouped(matrix.numbers, [&](auto kind) {
        multiply_grouped<decltype(kind)>(matrix, static_cast<const InputGroup*>(x), stride / GROUP_SIZE, scales, rows,
                                         threads, emit, work);
    });
}

// Writes the weights of one output of a matrix in panels. scaled: converts a weight to a float.
template <typename Kind, typename Scaled>
void unpack_panels(const Matrix& matrix, int64_t output, float* to, const Scaled& scaled) {
    const auto* weights = weights_of<Kind>(matrix, output);
    for (int64_t input = 0; input < matrix.inputs; ++input) {
        to[input] = scaled(weights[input / Kind::GROUP * PANEL * Kind::GROUP + input % Kind::GROUP]);
    }
}

void unpack_row(const Matrix& matrix, int64_t output, float* to) {
    switch (matrix.numbers) {
        case Numbers::float32: return unpack_panels<Float32>(matrix, output, to, [](float weight) { return weight; });
        case Numbers::bfloat16:
            return unpack_panels<Bfloat16>(matrix, output, to, [](bf16 weight) { return to_float(weight); });
        case Numbers::int8: {
            const float scale = matrix.scale[output];
            return unpack_panels<Int8>(matrix, output, to, [scale](int8_t weight) { return weight * scale; });
        }
        default:
            return with_grouped(matrix.numbers, [&](auto kind) { unpack_grouped<decltype(kind)>(matrix, output, to); });
    }
}

}  // namespace kvasir

using namespace kvasir;

// Writes the weights of some outputs of a matrix, row after row.
KVASIR_KERNEL void kvasir_unpack_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, float* to) {
    for (int64_t row = 0; row < count; ++row) unpack_row(*matrix, outputs[row], to + row * matrix->inputs);
}

// Returns GROUP: the number of adjacent inputs of one output in a packed matrix.
KVASIR_KERNEL int64_t kvasir_inputs_side_by_side(int64_t numbers) {
    switch (static_cast<Numbers>(numbers)) {
        case Numbers::float32: return Float32::GROUP;
        case Numbers::bfloat16: return Bfloat16::GROUP;
        default: return Int8::GROUP;
    }
}
