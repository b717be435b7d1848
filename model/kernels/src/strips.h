// Products with quantized matrices in strips of outputs, whose weights are read sequentially.
//
// A strip of STRIP outputs holds one step after another: the weights of Kind::INPUTS inputs, in Kind::BYTES bytes. Zeros
// fill the last step.
#pragma once

#include <algorithm>

#include "kernel.h"

namespace kvasir {

constexpr int STRIP_BLOCKS = 2, STRIP = STRIP_BLOCKS * LANES;

// Returns the number of steps of a strip.
template <typename Kind>
inline int64_t steps_of(const Matrix& matrix) { return (matrix.inputs + Kind::INPUTS - 1) / Kind::INPUTS; }

// Returns the address of the weights of the strip that holds an output.
template <typename Kind>
inline const uint8_t* strip_of(const Matrix& matrix, int64_t output) {
    return static_cast<const uint8_t*>(matrix.weight) + output / STRIP * steps_of<Kind>(matrix) * Kind::BYTES;
}

// Whether the CPU's own prefetching of a sequence is faster than prefetch instructions, with one or two rows: by a fifth on
// Zen 4. On Zen 3, which has AVX2 alone, the instructions are faster, by 5 to 35 %.
#if defined(__AVX512F__)
constexpr bool CPU_PREFETCHES = true;
#else
constexpr bool CPU_PREFETCHES = false;
#endif

// Part of the next strip that a tile prefetches: `lines` lines of 64 bytes of each step, from line `first` on. lines -1:
// the strip has one tile.
struct StripFetch {
    const uint8_t* next;
    int64_t first, lines;
};

// Lines of 64 bytes to prefetch in one step. Each part of them goes before a part of the step's products: CPUs stall on
// more than about 16 prefetches in a row.
struct Lines {
    const uint8_t* from;
    int64_t count;

    void prefetch(int64_t part, int64_t parts) const {  // into L2, which allows more outstanding reads than L1
        for (int64_t line = part * count / parts; line < (part + 1) * count / parts; ++line) {
            __builtin_prefetch(from + line * 64, 0, 2);
        }
    }
};

// Returns the lines that a tile of ROWS rows prefetches in step `step` of `steps`, whose weights start at `from`. The
// only tile of a strip prefetches its own strip, and near its end the first steps of the next one, or leaves that to the CPU.
template <typename Kind, int ROWS>
inline Lines lines_of(StripFetch fetch, const uint8_t* from, int64_t step, int64_t steps) {
    // Prefetch distance in bytes, which covers the latency of memory. One and two rows are faster with a short one.
    constexpr int64_t AHEAD = ROWS <= 2 ? 2304 : 12288 / Kind::BYTES * Kind::BYTES;
    if (fetch.lines >= 0) return {fetch.next + step * Kind::BYTES + fetch.first * 64, fetch.lines};
    const int64_t left = (steps - step) * Kind::BYTES;
    return {AHEAD < left ? from + AHEAD : fetch.next + (AHEAD - left),
            CPU_PREFETCHES && ROWS <= 2 ? 0 : Kind::BYTES / 64};
}

// Returns what one pass over a strip's steps prefetches of a tile's part; the pass multiplies BLOCKS blocks from block
// `first` on. Memory is thus read in all passes: the second pass of the only tile prefetches the next strip.
template <typename Kind, int BLOCKS>
inline StripFetch fetch_of_pass(StripFetch fetch, int first) {
    if (BLOCKS == STRIP_BLOCKS) return fetch;
    if (fetch.lines < 0) return first == 0 ? fetch : StripFetch{fetch.next, 0, Kind::BYTES / 64};
    const int64_t begin = fetch.lines * first / STRIP_BLOCKS, end = fetch.lines * (first + BLOCKS) / STRIP_BLOCKS;
    return {fetch.next, fetch.first + begin, end - begin};
}

// Returns the number of blocks that one pass over a strip's steps multiplies. `blocks`: those whose sums fit into registers
// for any number of rows. With one or two rows a pass reads everything in the order of memory, which is faster.
constexpr int blocks_of_pass(int num_rows, int blocks) { return num_rows <= 2 ? STRIP_BLOCKS : blocks; }

// As `multiply`, for a matrix in strips.
template <typename Kind>
void multiply_strips(const Matrix& matrix, const typename Kind::Input* x, int64_t stride, const float* scales,
                     int64_t rows, int64_t threads, Emit emit, const void* work) {
    constexpr int64_t LINES = Kind::BYTES / 64;
    const int64_t parts = (rows + TASK_ROWS - 1) / TASK_ROWS, panels = matrix.outputs / PANEL;
    const int64_t panel_bytes = PANEL / STRIP * steps_of<Kind>(matrix) * Kind::BYTES;
    const int64_t run = rows > Kind::ROWS ? 1 : panels_in_sequence(panels, panel_bytes, threads);
    parallel_for((panels + run - 1) / run * parts, threads, [&](int64_t task, int) {
        const int64_t first_output = task / parts * run * PANEL, start = task % parts * TASK_ROWS;
        const int64_t last_output = std::min(first_output + run * PANEL, matrix.outputs) - STRIP;
        const int64_t end = start + TASK_ROWS < rows ? start + TASK_ROWS : rows;
        const int64_t tiles = (end - start + Kind::ROWS - 1) / Kind::ROWS;
        for (int64_t output = first_output; output <= last_output; output += STRIP) {
            const int64_t next_output = output + STRIP + (output < last_output ? 0 : (threads - 1) * run * PANEL);
            const uint8_t* next = strip_of<Kind>(matrix, next_output);
            // Tiles of about the same size share the prefetching evenly.
            for (int64_t tile = 0, row = start, size; tile < tiles; ++tile, row += size) {
                size = (end - row) / (tiles - tile);
                const int64_t first = LINES * tile / tiles;
                const StripFetch fetch{next, first, tiles == 1 ? -1 : LINES * (tile + 1) / tiles - first};
                with_rows<Kind::ROWS>(static_cast<int>(size), [&](auto count) {
                    constexpr int ROWS = decltype(count)::value;
                    Lanes results[ROWS][STRIP_BLOCKS];
                    Kind::template sum<ROWS>(matrix, output, x + row * stride, stride, fetch, results);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
                        for (int b = 0; b < STRIP_BLOCKS; ++b) {
                            const int64_t at = output + b * LANES;
                            const Lanes scale = load(matrix.scale + at);
                            const Lanes scaled = mul(mul(results[r][b], splat(scales[row + r])), scale);
                            results[r][b] = matrix.bias == nullptr ? scaled : add(scaled, load(matrix.bias + at));
                        }
                        emit(work, row + r, output, results[r], STRIP_BLOCKS);
                    }
                });
            }
        }
    });
}

}  // namespace kvasir
