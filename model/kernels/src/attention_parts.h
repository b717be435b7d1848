// Tasks of an attention step, their scratch memory, and the joining of partial sums.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "attention_tile.h"
#include "batch.h"

namespace kvasir {

constexpr int SPLIT = 8 * TILE;
constexpr int MOST_ROWS = 16 * 6;  // maximum rows of queries in a task
constexpr float LOG2_E = 1.44269504f;

// Ranges of query rows, key/value heads and splits of one sequence. A row is a pair of a token and one of the query
// heads that share a key/value head: token * group + head.
struct Task {
    int64_t sequence;
    int first_row, end_row, first_head, end_head;
    int64_t first_split, end_split;
    // Offset in `partials` for the sums of one split; -1: the task computes all its splits and writes the output.
    int64_t partial;
};

// A sequence with one or more tasks for each split. partial: offset of the sums in `partials`, [split][head][row].
struct SplitSequence {
    int64_t sequence, partial, num_splits;
};

// Scratch memory of one thread. Grows as needed and is kept for later steps.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0;

    // Ends the process if the system has no more memory: a kernel runs in threads that cannot raise an exception to
    // their caller, and the service replaces a worker that ends.
    char* of(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, size));
            if (memory == nullptr) {
                std::fprintf(stderr, "kvasir: out of memory: attention needs %zu bytes of scratch memory\n", size);
                std::abort();
            }
        }
        return memory;
    }
};
inline thread_local Scratch scratch;

// Divides scratch memory into arrays aligned to 64 bytes. Run twice: for the total size, then for the arrays.
struct Cutter {
    char* at;

    template <typename Number>
    Number* operator()(int64_t count) {
        auto* array = reinterpret_cast<Number*>(at);
        at += (static_cast<size_t>(count) * sizeof(Number) + 63) / 64 * 64;
        return array;
    }
};

// Adds the sums of later positions (part) to those of earlier positions (joined). A part without keys changes nothing.
inline void join(Softmax& joined, float* joined_sums, const Softmax& part, const float* part_sums, int width) {
    if (part.total == 0) return;
    if (joined.total == 0) {
        joined = part;
        std::copy(part_sums, part_sums + width, joined_sums);
        return;
    }
    const float most = std::max(joined.largest, part.largest);
    const float before = exp2(joined.largest - most), after = exp2(part.largest - most);
    for (int offset = 0; offset < width; offset += LANES) {
        const Lanes old = mul(load(joined_sums + offset), splat(before));
        store(joined_sums + offset, fma(load(part_sums + offset), splat(after), old));
    }
    joined.total = joined.total * before + part.total * after;
    joined.largest = most;
}

}  // namespace kvasir
