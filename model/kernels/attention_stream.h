// What is read next, asked for in memory's order and a short way ahead of what is read, so that the nearest cache still
// has it then: a processor waits for few lines at a time, and what comes from the second cache takes a place of them.
#pragma once

#include "attention_parts.h"

namespace kvasir {

constexpr int LINE = 64;          // bytes that memory gives at once
constexpr int AHEAD = 24 * 1024;  // bytes between what is read and what is asked for

// A tile's keys or values of a task's heads, and what is read behind them. later: the next tile's tokens, of which
// addresses are looked up long before.
template <typename T>
struct Span {
    const T* pool = nullptr;
    const int64_t *at = nullptr, *later = nullptr;
    int num_tokens = 0, size = 0;
    const Span* next = nullptr;
};

// A tile of a task: where its tokens lie in the cache, in numbers; -1 for those that nobody in the task sees.
template <typename T>
struct Tile {
    const Task* task = nullptr;  // null: there is no such tile
    int64_t start = 0;
    int num_tokens = 0;
    int64_t at[TILE];
    Span<T> keys, values;
};

// A place among spans. At the end of the last it waits until another is laid behind.
template <typename T>
class Stream {
public:
    void begin(const Span<T>* first) {
        span = first;
        token = offset = 0;
        for (int bytes = 0; bytes < AHEAD; bytes += 4 * LINE) ask<4 * LINE>();
    }

    // Inlined, for GCC takes a function that does nothing else for one that does nothing, and leaves its calls out.
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
