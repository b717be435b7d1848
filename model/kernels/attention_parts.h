// What attention is told, how it is cut into tasks, and what these need of memory.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "attention_tile.h"
#include "batch.h"

namespace kvasir {

constexpr int SPLIT = 8 * TILE;
constexpr int MOST_ROWS = 16 * 6;  // of queries that one task takes against each tile
constexpr float LOG2_E = 1.44269504f;

// Some rows of a sequence's queries, of some key/value heads, over some splits of its context. A row is a token and one
// of the query heads that share a key/value head: token * group + head.
struct Task {
    int64_t sequence;
    int first_row, end_row, first_head, end_head;
    int64_t first_split, end_split;
    int64_t partial;  // where the sums of one split go; -1: this task has them all, and writes the output
};

// A sequence whose splits are tasks of their own, and where their sums are: [split][head][row].
struct SplitSequence {
    int64_t sequence, partial, num_splits;
};

// Grows, and is kept for the next step: one for each thread that ever ran a kernel.
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

// Cuts a thread's scratch memory into arrays: once to know their sizes, once to have them.
struct Cutter {
    char* at;

    template <typename Number>
    Number* operator()(int64_t count) {
        auto* array = reinterpret_cast<Number*>(at);
        at += (static_cast<size_t>(count) * sizeof(Number) + 63) / 64 * 64;
        return array;
    }
};

// joined += part, sums of earlier and of later positions. Nothing is done where the part has seen nothing.
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
