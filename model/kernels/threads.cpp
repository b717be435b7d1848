// The threads that kernels run on, and a look at how fast they read memory.
//
// OpenMP ends a parallel region when every thread has arrived. So a step of two threads beside one busy neighbour waits,
// region after region, for a thread that the system has put aside, with nothing left to do. Here a region ends with its
// last index: whoever is there takes the work, and a thread that comes late finds none.
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

constexpr int TURNS_BEFORE_SLEEP = 4000;  // 50 to 200 microseconds, as long as processors rest: what one thread does alone
constexpr int TURNS_BEFORE_YIELD = 1000;  // of who waits for the last index: its thread may want this processor

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    const pid_t process = getpid();  // threads do not follow into a fork

    // One caller at a time has the threads; another does its work alone.
    bool take() { return !is_taken.exchange(true, std::memory_order_acquire); }
    void give_back() { is_taken.store(false, std::memory_order_release); }

    void run(int64_t count, int64_t threads, Work work, const void* data) {
        grow(threads - 1);
        all = {work, data, count};
        unfinished.store(count, std::memory_order_relaxed);
        const bool are_others = most.exchange(static_cast<int>(threads), std::memory_order_relaxed) != threads;
        left.store(count);  // from here on any thread takes some
        if (asleep.load() > 0 || are_others) {
            { const std::lock_guard<std::mutex> lock(mutex); }  // who is about to sleep sleeps, or has seen the work
            wake.notify_all();
        }
        while (do_one(0)) {
        }
        for (int turn = 0; unfinished.load(std::memory_order_acquire) > 0; ++turn) {
            turn < TURNS_BEFORE_YIELD ? rest() : std::this_thread::yield();
        }
    }

    void begin_busy() { busy.fetch_add(1, std::memory_order_relaxed); }
    void end_busy() { busy.fetch_sub(1, std::memory_order_relaxed); }

private:
    struct Region {
        Work work;
        const void* data;
        int64_t count;
    } all{};  // written only while nothing is left and nothing unfinished; read by who has taken an index
    alignas(64) std::atomic<int64_t> left{0};
    alignas(64) std::atomic<int64_t> unfinished{0};
    alignas(64) std::atomic<int> busy{0};
    std::atomic<int> most{0}, asleep{0};
    std::atomic<bool> is_taken{false};
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
            } else if (busy.load(std::memory_order_relaxed) > 0 && ++turn < TURNS_BEFORE_SLEEP) {
                rest();
            } else {
                sleep(thread);
                turn = 0;
            }
        }
    }

    // Until there is work for it. One that is not among those at work does not count: nobody need wake it.
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

    // Fewer threads than are wanted do the same work.
    void grow(int64_t wanted) {
        if (num_threads >= wanted) return;
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the threads that were there
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
Pool* made = nullptr;  // never destroyed: its threads wait for it until the process ends

Pool& pool() {
    const std::lock_guard<std::mutex> lock(making);
    if (made == nullptr || made->process != getpid()) made = new Pool;
    return *made;
}

thread_local Pool* ours = nullptr;  // the pool that this thread has taken

}  // namespace

void run_parallel(int64_t count, int64_t threads, Work work, const void* data) {
    const Busy busy;
    if (ours == nullptr) {
        for (int64_t index = 0; index < count; ++index) work(data, index, 0);
    } else {
        ours->run(count, threads, work, data);
    }
}

namespace {
thread_local int depth = 0;  // of Busy in this thread
}

Busy::Busy() {
    if (depth++ > 0) return;
    Pool& all = pool();
    if (!all.take()) return;
    ours = &all;
    ours->begin_busy();
}

Busy::~Busy() {
    if (--depth > 0 || ours == nullptr) return;
    ours->end_busy();
    ours->give_back();
    ours = nullptr;
}

}  // namespace kvasir

// Reads count 64-bit words, a piece a task, and returns their exclusive or: what memory gives at most.
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
