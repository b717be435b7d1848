// Prefetching of keys and values into L1, in memory order and a short distance ahead of the reads. The distance is
// short so that lines are still in L1 when they are read. A processor has few outstanding line fetches, and a read from
// L2 would occupy one of them.
#pragma once

#include "attention_parts.h"

namespace kvasir {

constexpr int LINE = 64;          // bytes of a cache line
constexpr int AHEAD = 24 * 1024;  // bytes between a read and the prefetch

// The keys or the values of a tile for a task's heads. next: the span that is read after this one. later: the tokens of
// the next tile. Their first lines are prefetched early, so that their addresses are translated in time.
template <typename T>
struct Span {
    const T* pool = nullptr;
    const int64_t *at = nullptr, *later = nullptr;
    int num_tokens = 0, size = 0;
    const Span* next = nullptr;
};

// A tile of a task. at: offset of each token in the cache, in numbers; -1 for tokens that no row of the task sees.
template <typename T>
struct Tile {
    const Task* task = nullptr;  // null: there is no tile
    int64_t start = 0;
    int num_tokens = 0;
    int64_t at[TILE];
    Span<T> keys, values;
};

// Prefetch position in a chain of spans. Stops at the end of the last span until another span is linked after it.
template <typename T>
class Stream {
public:
    void begin(const Span<T>* first) {
        span = first;
        token = offset = 0;
        for (int bytes = 0; bytes < AHEAD; bytes += 4 * LINE) ask<4 * LINE>();
    }

    // Always inlined: GCC treats a function that only prefetches as one without effects, and removes its calls.
    template <int BYTES>
    __attribute__((always_inline)) inline void ask() {
        if (token >= span->num_tokens) return;
        if (const int64_t from = span->at[token]; from >= 0) {
            for (int byte = 0; byte < BYTES; byte += LINE) {
                __builtin_prefetch(span->pool + from + offset + byte / static_cast<int>(sizeof(T)), 0, 3);
            }
        }
        offset += BYTES / static_cast<int>(sizeof(T));
        if (offset < span->size) return;
        offset = 0;
        if (span->later != nullptr && span->later[token] >= 0) {
            __builtin_prefetch(span->pool + span->later[token], 0, 3);
        }
        if (++token < span->num_tokens || span->next == nullptr) return;
        span = span->next;
        token = 0;
    }

private:
    const Span<T>* span = nullptr;
    int token = 0, offset = 0;
};

}  // namespace kvasir
