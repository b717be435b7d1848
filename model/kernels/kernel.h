// What every kernel needs: how it is exported, and the threads it runs on.
#pragma once

#include <cstdint>

#define KVASIR_KERNEL extern "C" __attribute__((visibility("default")))

namespace kvasir {

// Calls work(data, index, thread) for every index under count: see parallel_for, and threads.cpp.
using Work = void (*)(const void* data, int64_t index, int thread);
void run_parallel(int64_t count, int64_t threads, Work work, const void* data);

// Calls work(index, thread) for every index under count, on up to `threads` threads, the caller's among them; each takes
// the next index when it is done with one. thread is unique among those at work. Returns when all of it is done, which
// is when the last index is, not when every thread has come: one that the system lets wait holds nobody up.
template <typename Callable>
void parallel_for(int64_t count, int64_t threads, const Callable& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index, 0);
        return;
    }
    const Work call = [](const void* data, int64_t index, int thread) {
        (*static_cast<const Callable*>(data))(index, thread);
    };
    run_parallel(count, threads, call, &work);
}

// While one lives, threads that have nothing to do look for work instead of sleeping: between the parts of a step that
// follow each other within microseconds.
class Busy {
public:
    Busy();
    ~Busy();
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
};

}  // namespace kvasir
