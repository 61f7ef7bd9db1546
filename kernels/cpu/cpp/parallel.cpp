#include "parallel.hpp"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int POLLS = 64;   // between two yields: a few microseconds
constexpr int YIELDS = 10;  // before a helper sleeps
constexpr uint64_t INDEX = 20, MASK = (1 << INDEX) - 1;

class ThreadPool {
public:
    // Runs one loop at a time. Meanwhile the loop of another caller runs on that caller's thread only.
    void run(int64_t count, int threads, Part part, void* context) {
        std::unique_lock<std::mutex> turn(loop_mutex, std::try_to_lock);
        if (!turn.owns_lock()) {
            for (int64_t i = 0; i < count; i++) part(context, i);
            return;
        }
        admit(threads - 1);
        this->part = part;
        this->context = context;
        done.store(0, std::memory_order_relaxed);
        loop++;
        state.store(loop << 2 * INDEX | (uint64_t)count << INDEX);
        if (sleeping.load()) {
            { std::lock_guard<std::mutex> lock(sleep_mutex); }
            wake.notify_all();
        }
        while (take()) {}
        for (int polls = 1; done.load(std::memory_order_acquire) < count; polls++)
            polls % POLLS ? rest() : (void)sched_yield();
    }

private:
    // Lets the first `count` helpers run parts, or as many as the system allows, and the others sleep.
    void admit(int count) {
        try {
            for (; helpers < count; helpers++) std::thread([this, index = helpers] { help(index); }).detach();
        } catch (const std::system_error&) {
        }
        if (count == admitted.load(std::memory_order_relaxed)) return;
        { std::lock_guard<std::mutex> lock(sleep_mutex); admitted.store(count); }
        admission.notify_all();
    }

    // Runs one part, if one is left. The loop's fields may be read only after taking a part: the next loop cannot begin
    // until that part is done.
    bool take() {
        uint64_t seen = state.load(std::memory_order_acquire);
        do {
            if ((seen & MASK) >= (seen >> INDEX & MASK)) return false;
        } while (!state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel));
        part(context, seen & MASK);
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool waiting() const {
        uint64_t seen = state.load();
        return (seen & MASK) < (seen >> INDEX & MASK);
    }

    void help(int index) {
        while (true) {
            if (index >= admitted.load(std::memory_order_relaxed)) {
                std::unique_lock<std::mutex> lock(sleep_mutex);
                admission.wait(lock, [this, index] { return index < admitted.load(); });
            }
            for (int polls = 1; polls < POLLS * YIELDS && index < admitted.load(std::memory_order_relaxed); polls++) {
                if (take()) polls = 0;
                else polls % POLLS ? rest() : (void)sched_yield();
            }
            std::unique_lock<std::mutex> lock(sleep_mutex);
            sleeping++;
            wake.wait(lock, [this, index] { return waiting() || index >= admitted.load(); });
            sleeping--;
        }
    }

    std::mutex loop_mutex, sleep_mutex;
    std::condition_variable wake, admission;
    std::atomic<int> sleeping{0};  // helpers that wait for the next loop
    std::atomic<int> admitted{0};  // helpers that run parts
    alignas(64) std::atomic<uint64_t> state{0};  // number of the loop, count of its parts, count of parts taken
    alignas(64) std::atomic<int64_t> done{0};
    Part part = nullptr;
    void* context = nullptr;
    uint64_t loop = 0;
    int helpers = 0;
};

}  // namespace

void run_parts(int64_t count, int threads, Part part, void* context) {
    static ThreadPool& pool = *new ThreadPool;  // never deleted, because its threads may outlive static destructors
    pool.run(count, threads, part, context);
}
