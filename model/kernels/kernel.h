// What every kernel needs: how it is exported, and the threads it runs on.
#pragma once

#include <atomic>
#include <cstdint>

#define KVASIR_KERNEL extern "C" __attribute__((visibility("default")))

namespace kvasir {

// GOMP_parallel(run, data, threads, flags) of the OpenMP runtime that PyTorch has loaded, or null: see threads.cpp.
using Parallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);
extern Parallel parallel;

// Calls work(index, thread) for every index under count, on up to `threads` threads of PyTorch's pool, the caller's
// among them; each takes the next index when it is done with one. thread is unique among those at work.
template <typename Work>
void parallel_for(int64_t count, int64_t threads, const Work& work) {
    if (threads > count) threads = count;
    if (threads <= 1 || parallel == nullptr) {
        for (int64_t index = 0; index < count; ++index) work(index, 0);
        return;
    }
    struct Shared {
        const Work* work;
        int64_t count;
        std::atomic<int64_t> next;
        std::atomic<int> entered;
    } shared{&work, count, {0}, {0}};
    auto run = [](void* data) {
        auto* all = static_cast<Shared*>(data);
        const int thread = all->entered.fetch_add(1, std::memory_order_relaxed);
        for (;;) {
            const int64_t index = all->next.fetch_add(1, std::memory_order_relaxed);
            if (index >= all->count) return;
            (*all->work)(index, thread);
        }
    };
    parallel(run, &shared, static_cast<unsigned>(threads), 0);
}

}  // namespace kvasir
