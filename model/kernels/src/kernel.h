// Common declarations of all kernels: the export macro, parallel_for and Busy.
#pragma once

#include <cstdint>

#define KVASIR_KERNEL extern "C" __attribute__((visibility("default")))

namespace kvasir {

// Calls work(data, index, thread) for every index from 0 to count - 1. See parallel_for, and threads.cpp.
using Work = void (*)(const void* data, int64_t index, int thread);
void run_parallel(int64_t count, int64_t threads, Work work, const void* data);

// Calls work(index, thread) for every index from 0 to count - 1, on up to `threads` threads. One of them is the calling
// thread. A thread takes the next index when it has finished one. The argument `thread` is unique among the running
// threads. Returns when the last index is finished, even if some threads never started: a thread that the system does
// not schedule delays no other thread.
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

// While an object of this class exists, idle threads spin instead of sleeping. For parts of a step that follow each
// other within microseconds.
class Busy {
public:
    Busy();
    ~Busy();
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
};

}  // namespace kvasir
