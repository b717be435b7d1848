// Thread pool of the kernels, and a parallel read by which a caller measures the memory bandwidth.
//
// An OpenMP region ends when every thread has arrived, so a CPU that another process keeps busy delays the region. Here
// a region ends with its last index: running threads take all the work, and a late thread finds none.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

#include "kernel.h"

namespace kvasir {
namespace {

// 50 to 200 us, depending on the CPU's pause instruction: covers the single-threaded work between regions.
constexpr int TURNS_BEFORE_SLEEP = 4000;
constexpr int TURNS_BEFORE_YIELD = 1000;  // then a waiting caller yields: the last index's thread may need its CPU

class Pool {
public:
    const pid_t process = getpid();  // threads do not exist in a forked child

    // One calling thread at a time owns the pool. Other callers run their work on their own thread alone.
    bool take() { return !is_taken.exchange(true, std::memory_order_acquire); }
    void give_back() { is_taken.store(false, std::memory_order_release); }

    void run(int64_t count, int64_t threads, Work work, const void* data) {
        grow(threads - 1);
        all = {work, data, count};
        unfinished.store(count, std::memory_order_relaxed);
        const bool are_others = most.exchange(static_cast<int>(threads), std::memory_order_relaxed) != threads;
        left.store(count);  // from here on any thread may take an index
        if (asleep.load() > 0 || are_others) {
            { const std::lock_guard<std::mutex> lock(mutex); }  // a thread that goes to sleep now waits or saw work
            wake.notify_all();
        }
        while (do_one(0)) {
        }
        for (int turn = 0; unfinished.load(std::memory_order_acquire) > 0; ++turn) {
            turn < TURNS_BEFORE_YIELD ? _mm_pause() : std::this_thread::yield();
        }
    }

private:
    struct Region {
        Work work;
        const void* data;
        int64_t count;
    } all{};  // written only while left and unfinished are 0; read only by threads that have taken an index
    alignas(64) std::atomic<int64_t> left{0};
    alignas(64) std::atomic<int64_t> unfinished{0};
    alignas(64) std::atomic<bool> is_taken{false};
    std::atomic<int> most{0}, asleep{0};
    std::mutex mutex;
    std::condition_variable wake;
    int num_threads = 0;

    bool do_one(int thread) {
        int64_t mine = left.load(std::memory_order_relaxed);
        do {
            if (mine <= 0) return false;
        } while (!left.compare_exchange_weak(mine, mine - 1, std::memory_order_acquire, std::memory_order_relaxed));
        all.work(all.data, all.count - mine, thread);
        unfinished.fetch_sub(1, std::memory_order_release);
        return true;
    }

    bool has_work(int thread) const { return left.load() > 0 && thread < most.load(std::memory_order_relaxed); }

    void live(int thread) {
        for (int turn = 0;;) {
            if (has_work(thread) && do_one(thread)) {
                turn = 0;
            } else if (is_taken.load(std::memory_order_relaxed) && ++turn < TURNS_BEFORE_SLEEP) {
                _mm_pause();
            } else {
                sleep(thread);
                turn = 0;
            }
        }
    }

    // Sleeps until there is work for the thread. Threads that the current region may not use need no wake-up.
    void sleep(int thread) {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            const bool counts = thread < most.load(std::memory_order_relaxed);
            if (counts) asleep.fetch_add(1);
            const bool is_done = has_work(thread);
            if (!is_done) wake.wait(lock);
            if (counts) asleep.fetch_sub(1);
            if (is_done) return;
        }
    }

    // Starts threads until there are `wanted`. If the system allows fewer, those do all the work.
    void grow(int64_t wanted) {
        if (num_threads >= wanted) return;
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);  // signals must go to threads of the application
        try {
            while (num_threads < wanted) {
                std::thread([this, thread = num_threads + 1] { live(thread); }).detach();
                ++num_threads;
            }
        } catch (const std::system_error&) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

std::mutex making;
Pool* made = nullptr;  // never destroyed: its threads use it until the process ends

Pool& pool() {
    const std::lock_guard<std::mutex> lock(making);
    if (made == nullptr || made->process != getpid()) made = new Pool;
    return *made;
}

thread_local Pool* ours = nullptr;  // the pool that this thread owns, or null
thread_local int depth = 0;         // number of nested Busy objects in this thread

}  // namespace

void run_parallel(int64_t count, int64_t threads, Work work, const void* data) {
    const Busy busy;
    if (ours == nullptr) {
        for (int64_t index = 0; index < count; ++index) work(data, index, 0);
    } else {
        ours->run(count, threads, work, data);
    }
}

Busy::Busy() {
    if (depth++ > 0) return;
    Pool& all = pool();
    if (all.take()) ours = &all;
}

Busy::~Busy() {
    if (--depth > 0 || ours == nullptr) return;
    ours->give_back();
    ours = nullptr;
}

}  // namespace kvasir

// Reads `count` 64-bit words in parallel and returns their exclusive or. The caller times it to get the bandwidth of
// the memory.
KVASIR_KERNEL uint64_t kvasir_read(const uint64_t* words, int64_t count, int64_t threads) {
    constexpr int64_t piece = 1 << 17;
    std::atomic<uint64_t> result{0};
    kvasir::parallel_for((count + piece - 1) / piece, threads, [&](int64_t index, int) {
        const uint64_t* from = words + index * piece;
        const int64_t size = count - index * piece < piece ? count - index * piece : piece;
        uint64_t folded = 0;
        for (int64_t word = 0; word < size; ++word) folded ^= from[word];
        result.fetch_xor(folded, std::memory_order_relaxed);
    });
    return result.load();
}
