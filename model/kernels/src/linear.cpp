// Products with packed matrices, computed in tiles of rows and outputs. The sums of a tile stay in registers.
#include <algorithm>

#include "floats.h"
#include "quantized.h"

namespace kvasir {
namespace {

constexpr int64_t FETCH_AHEAD = 24;  // prefetch distance, in groups of inputs: covers the latency of memory

// Kind of int8 matrices; see floats.h.
struct Int8 {
    using Weight = int8_t;
    using Input = Int8Input;
    using Sums = Bytes;
    using Spread = Register;
    static constexpr int GROUP = 4, PARTS = 1, SUMS = HAS_BYTE_DOT ? TILE_SUMS : FEWER_SUMS;
    static Sums zero() { return Sums(); }
    static Bytes weights(const Weight* from, int) { return load_bytes(from); }
    static Spread spread(const Input* from, int) { return repeat_word(load_word(from)); }
    static Sums step(Sums sums, Bytes weights, Spread inputs) { return dot(sums, weights, inputs); }
    static Bytes shifted(Sums sums, const int32_t* shift) {
        return HAS_BYTE_DOT ? each(subtract_words, sums, load_bytes(shift)) : sums;
    }
};

// Converts sums to results: applies the scales (int8 only) and the bias.
template <typename Kind>
inline Lanes finished(typename Kind::Sums sums, const Matrix& matrix, int64_t output, float row_scale) {
    Lanes result;
    if constexpr (Kind::GROUP == 4) {
        const Lanes products = to_floats(Kind::shifted(sums, matrix.shift + output));
        result = mul(mul(products, splat(row_scale)), load(matrix.scale + output));
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

// Prefetch plan of a tile. from: the weights that this thread will probably read next. lines: number of lines of 64
// bytes of `from` that the tile prefetches for each group of inputs; 0: the first pass of the tile prefetches the tile's
// own weights, and near its end the first of `from`.
struct Prefetch {
    const char* from;
    int lines;
};

constexpr int64_t PANEL_STEP = PANEL * 4;  // bytes of a group of inputs of a panel, in every type of matrix

// Applies scales and bias to the sums of a tile, and emits the results row by row.
template <typename Kind, int ROWS>
inline void emit_tile(const typename Kind::Sums (&sums)[ROWS][TILE_BLOCKS], const Matrix& matrix, const float* scales,
                      int64_t row, int64_t output, Emit emit, const void* work) {
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

// Multiplies ROWS rows of inputs with the blocks of a panel: at once, or in passes of two or one if registers for all sums
// are missing. SHARES: each pass prefetches the next weights of its blocks, so that memory is read in all passes.
template <typename Kind, int ROWS, bool SHARES>
inline void tile(const typename Kind::Weight* weight, const Matrix& matrix, const typename Kind::Input* x,
                 int64_t stride, const float* scales, int64_t row, int64_t output, Prefetch prefetch, Emit emit,
                 const void* work) {
    constexpr int BLOCKS = ROWS * TILE_BLOCKS <= Kind::SUMS ? TILE_BLOCKS : ROWS * 2 <= Kind::SUMS ? 2 : 1;
    constexpr int64_t BLOCK = LANES * Kind::GROUP, STEP = PANEL * Kind::GROUP;
    const int64_t groups = (matrix.inputs + Kind::GROUP - 1) / Kind::GROUP;
    x += row * stride;
    typename Kind::Sums sums[ROWS][TILE_BLOCKS];
#pragma GCC unroll 2
    for (int pass = 0; pass < TILE_BLOCKS; pass += BLOCKS) {
        typename Kind::Sums part_sums[ROWS][BLOCKS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) part_sums[r][b] = Kind::zero();
        }
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t at = group * STEP;
            // Prefetch into L2, which allows more outstanding reads than L1.
            if (SHARES && (pass > 0 || prefetch.lines > 0)) {
                const char* from = prefetch.from + group * PANEL_STEP + pass * 64;
                for (int line = 0; line < BLOCKS; ++line) __builtin_prefetch(from + line * 64, 0, 2);
            } else if (pass > 0) {
                // The first pass has prefetched.
            } else if (prefetch.lines > 0) {
                const char* from = prefetch.from + group * PANEL_STEP;
                for (int line = 0; line < prefetch.lines; ++line) __builtin_prefetch(from + line * 64, 0, 2);
            } else {
                const int64_t ahead = (group + FETCH_AHEAD) * PANEL_STEP;
                const char* from = group + FETCH_AHEAD < groups ? reinterpret_cast<const char*>(weight) + ahead
                                                                : prefetch.from + ahead - groups * PANEL_STEP;
                for (int b = 0; b < TILE_BLOCKS; ++b) __builtin_prefetch(from + b * 64, 0, 2);
            }
#pragma GCC unroll 2
            for (int part = 0; part < Kind::PARTS; ++part) {
                decltype(Kind::weights(weight, part)) weights[BLOCKS];
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; ++b) weights[b] = Kind::weights(weight + at + (pass + b) * BLOCK, part);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const auto inputs = Kind::spread(x + r * stride + group * Kind::GROUP, part);
#pragma GCC unroll 4
                    for (int b = 0; b < BLOCKS; ++b) {
                        part_sums[r][b] = Kind::step(part_sums[r][b], weights[b], inputs);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) sums[r][pass + b] = part_sums[r][b];
        }
    }
    emit_tile<Kind, ROWS>(sums, matrix, scales, row, output, emit, work);
}

template <typename Kind>
void multiply_as(const Matrix& matrix, const void* x, int64_t stride, const float* scales, int64_t rows,
                 int64_t threads, Emit emit, const void* work) {
    constexpr int64_t OUTPUTS = TILE_BLOCKS * LANES;
    constexpr int ROWS = std::min(TILE_ROWS, Kind::SUMS);
    const int64_t parts = (rows + TASK_ROWS - 1) / TASK_ROWS, panels = matrix.outputs / PANEL;
    const int64_t panel_bytes = (matrix.inputs + Kind::GROUP - 1) / Kind::GROUP * PANEL_STEP;
    const int64_t run = rows > ROWS ? 1 : panels_in_sequence(panels, panel_bytes, threads);
    const auto* inputs = static_cast<const typename Kind::Input*>(x);
    parallel_for((panels + run - 1) / run * parts, threads, [&](int64_t task, int) {
        const int64_t first_output = task / parts * run * PANEL, first = task % parts * TASK_ROWS;
        const int64_t end_output = std::min(first_output + run * PANEL, matrix.outputs);
        const int64_t end = first + TASK_ROWS < rows ? first + TASK_ROWS : rows;
        // The first tile waits for its weights. The other tiles share the prefetching of the next weights.
        const auto others = static_cast<int>((end - first + ROWS - 1) / ROWS - 1);
        const int share = others > 0 ? (TILE_BLOCKS + others - 1) / others : 0;
        for (int64_t output = first_output; output < end_output; output += OUTPUTS) {
            const int64_t next_output = output + OUTPUTS;
            const int64_t skipped = next_output < end_output ? 0 : (threads - 1) * run * PANEL;
            const auto* next = reinterpret_cast<const char*>(weights_of<Kind>(matrix, next_output + skipped));
            int fetched = -share;
            auto next_prefetch = [&]() -> Prefetch {
                const int line = fetched + share <= TILE_BLOCKS ? fetched : TILE_BLOCKS - share;
                fetched += share;
                return line < 0 ? Prefetch{next, 0} : Prefetch{next + line * 64, share};
            };
            // Tiles of about the same size: a tile of one row takes as long as one of two.
            for (int64_t tile_index = 0, row = first, size; tile_index <= others; ++tile_index, row += size) {
                size = (end - row) / (others + 1 - tile_index);
                const Prefetch prefetch = next_prefetch();
                with_rows<ROWS>(static_cast<int>(size), [&](auto count) {
                    constexpr int SIZE = decltype(count)::value;
                    constexpr bool HAS_PASSES = SIZE * TILE_BLOCKS > Kind::SUMS;
                    const auto* weights = weights_of<Kind>(matrix, output);
                    if (HAS_PASSES && (others == 0 || prefetch.lines == TILE_BLOCKS)) {
                        tile<Kind, SIZE, HAS_PASSES>(weights, matrix, inputs, stride, scales, row, output, prefetch, emit,
                                                     work);
                    } else {
                        tile<Kind, SIZE, false>(weights, matrix, inputs, stride, scales, row, output, prefetch, emit, work);
                    }
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
    with_strips(matrix.numbers, [&](auto kind) {
        using Kind = decltype(kind);
        multiply_strips<Kind>(matrix, static_cast<const typename Kind::Input*>(x), stride / Kind::INPUTS, scales, rows,
                              threads, emit, work);
    });
}

// Emits the results of a piece of a product: adds the piece's first row and output to the row and output.
struct PieceEmit {
    Emit emit;
    const void* work;
    Piece piece;

    static void call(const void* self, int64_t row, int64_t output, const Lanes* results, int blocks) {
        const auto& mine = *static_cast<const PieceEmit*>(self);
        mine.emit(mine.work, mine.piece.first + row, mine.piece.output + output, results, blocks);
    }
};

void multiply_piece(const Matrix& matrix, const void* x, int64_t stride, const float* scales, Piece piece, Emit emit,
                    const void* work) {
    Matrix panel = matrix;
    panel.outputs = piece.outputs;
    int64_t row_bytes = stride;
    switch (matrix.numbers) {
        case Numbers::float32:
            panel.weight = weights_of<Float32>(matrix, piece.output), row_bytes = stride * sizeof(float);
            break;
        case Numbers::bfloat16:
            panel.weight = weights_of<Bfloat16>(matrix, piece.output), row_bytes = stride * sizeof(Bfloat16Input);
            break;
        case Numbers::int8: panel.weight = weights_of<Int8>(matrix, piece.output); break;
        default:
            with_strips(matrix.numbers, [&](auto kind) {
                using Kind = decltype(kind);
                panel.weight = strip_of<Kind>(matrix, piece.output);
                row_bytes = stride / Kind::INPUTS * sizeof(typename Kind::Input);
            });
    }
    if (matrix.bias != nullptr) panel.bias += piece.output;
    if (matrix.scale != nullptr) panel.scale += piece.output;
    if (matrix.shift != nullptr) panel.shift += piece.output;
    const PieceEmit shifted{emit, work, piece};
    const float* row_scales = scales == nullptr ? nullptr : scales + piece.first;
    const char* rows = static_cast<const char*>(x) + piece.first * row_bytes;
    multiply(panel, rows, stride, row_scales, piece.end - piece.first, 1, PieceEmit::call, &shifted);
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
        default: return with_strips(matrix.numbers, [&](auto kind) { unpack(kind, matrix, output, to); });
    }
}

}  // namespace kvasir

using namespace kvasir;

// Writes the weights of some outputs of a matrix, row after row.
KVASIR_KERNEL void kvasir_unpack_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, float* to) {
    for (int64_t row = 0; row < count; ++row) unpack_row(*matrix, outputs[row], to + row * matrix->inputs);
}

// Returns the number of adjacent inputs of one output in a packed matrix of this type, if it is not int4 or grouped.
KVASIR_KERNEL int64_t kvasir_inputs_side_by_side(int64_t numbers) {
    switch (static_cast<Numbers>(numbers)) {
        case Numbers::float32: return Float32::GROUP;
        case Numbers::bfloat16: return Bfloat16::GROUP;
        default: return Int8::GROUP;
    }
}
