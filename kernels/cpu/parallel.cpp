#include "parallel.hpp"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

constexpr int LOOKS = 64;   // between two offers of the core to others: a few microseconds
constexpr int OFFERS = 10;  // until a helper sleeps
constexpr uint64_t INDEX = 20, MASK = (1 << INDEX) - 1;

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Crew {
public:
    // One loop at a time: while one runs, another caller's runs on that caller's thread alone.
    void run(int64_t count, int threads, Part part, void* context) {
        std::unique_lock<std::mutex> turn(turns, std::try_to_lock);
        if (!turn.owns_lock()) {
            for (int64_t i = 0; i < count; i++) part(context, i);
            return;
        }
        for (; helpers < threads - 1; helpers++) std::thread([this] { help(); }).detach();
        this->part = part;
        this->context = context;
        done.store(0, std::memory_order_relaxed);
        loop++;
        offer.store(loop << 2 * INDEX | (uint64_t)count << INDEX);
        if (sleeping.load()) {
            { std::lock_guard<std::mutex> lock(bed); }
            wake.notify_all();
        }
        while (take()) {}
        for (int looks = 1; done.load(std::memory_order_acquire) < count; looks++) looks % LOOKS ? rest() : (void)sched_yield();
    }

private:
    // Does one part, if there is one. What a loop is may be read only after a part of it was taken: until that part is
    // done the next loop cannot begin.
    bool take() {
        uint64_t seen = offer.load(std::memory_order_acquire);
        do {
            if ((seen & MASK) >= (seen >> INDEX & MASK)) return false;
        } while (!offer.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel));
        part(context, seen & MASK);
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool waiting() const {
        uint64_t seen = offer.load();
        return (seen & MASK) < (seen >> INDEX & MASK);
    }

    void help() {
        while (true) {
            for (int looks = 1; looks < LOOKS * OFFERS; looks++) {
                if (take()) looks = 0;
                else looks % LOOKS ? rest() : (void)sched_yield();
            }
            std::unique_lock<std::mutex> lock(bed);
            sleeping++;
            wake.wait(lock, [this] { return waiting(); });
            sleeping--;
        }
    }

    std::mutex turns, bed;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    alignas(64) std::atomic<uint64_t> offer{0};  // number of the loop, its parts, and those that were taken
    alignas(64) std::atomic<int64_t> done{0};
    Part part = nullptr;
    void* context = nullptr;
    uint64_t loop = 0;
    int helpers = 0;
};

}  // namespace

void run_parts(int64_t count, int threads, Part part, void* context) {
    static Crew& crew = *new Crew;  // for ever: its threads may outlive what ends with the process
    crew.run(count, threads, part, context);
}
