#include "collectives.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <sched.h>
#include <time.h>

#include "parallel.hpp"
#include "vector.hpp"

namespace {

constexpr int POLLS = 64;                  // between two yields: a few microseconds
constexpr int YIELDS = 10;                 // before a rank sleeps
constexpr long SLEEP_NANOSECONDS = 50'000'000;  // after which a sleeper looks for an abort that it has missed

void sleep_at(std::atomic<uint32_t>& value, uint32_t seen) {
#if defined(__linux__)
    timespec time = {0, SLEEP_NANOSECONDS};
    syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    timespec time = {0, 50'000};
    nanosleep(&time, nullptr);
#endif
}

void wake(Stamp& stamp) {
#if defined(__linux__)
    if (stamp.sleepers.load()) syscall(SYS_futex, (uint32_t*)&stamp.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void raise(Stamp& stamp, uint32_t number) {
    stamp.value.store(number);
    wake(stamp);
}

bool reached(const Stamp& stamp, uint32_t number) {
    return int32_t(stamp.value.load(std::memory_order_acquire) - number) >= 0;
}

bool is_aborted(const Segment& segment) { return segment.aborted.value.load(std::memory_order_acquire) != 0; }

// Waits until the stamp has reached `number`; returns false if the ranks are aborted.
bool wait_for(const Segment& segment, Stamp& stamp, uint32_t number) {
    for (int polls = 1; polls < POLLS * YIELDS; polls++) {
        if (reached(stamp, number)) return !is_aborted(segment);
        polls % POLLS ? rest() : (void)sched_yield();
    }
    stamp.sleepers++;
    bool in_time = true;
    while (!reached(stamp, number)) {
        uint32_t seen = stamp.value.load();
        if (int32_t(seen - number) >= 0) break;
        if (is_aborted(segment)) {
            in_time = false;
            break;
        }
        sleep_at(stamp.value, seen);
    }
    stamp.sleepers--;
    return in_time;
}

// One exchange: every rank fills its own buffer, and reads those of all when they are full.
class Exchange {
public:
    explicit Exchange(Ranks& ranks) : ranks(ranks), number(++ranks.exchanges) {}

    // A rank that fills this buffer again has seen all ranks in the exchange in between, so none reads it any more.
    float* buffer(int64_t rank) const { return ranks.buffers + ((number & 1) * ranks.size + rank) * ranks.length; }

    float* own() const { return buffer(ranks.rank); }

    bool share() const {
        Segment& segment = *ranks.segment;
        raise(segment.shared[ranks.rank], number);
        for (int64_t rank = 0; rank < ranks.size; rank++)
            if (!wait_for(segment, segment.shared[rank], number)) return false;
        return true;
    }

private:
    Ranks& ranks;
    uint32_t number;
};

}  // namespace

extern "C" {

int64_t segment_bytes() { return sizeof(Segment); }

void all_reduce(Ranks* ranks, float* x, int64_t count, int threads) {
    for (int64_t first = 0; first < count; first += ranks->length) {
        int64_t part = std::min(ranks->length, count - first);
        float* own = x + first;
        Exchange exchange(*ranks);
        parallel(part, SERIAL_NUMBERS, threads, [&](int64_t begin, int64_t end) {
            std::memcpy(exchange.own() + begin, own + begin, (end - begin) * sizeof(float));
        });
        if (!exchange.share()) return;
        parallel(part, SERIAL_NUMBERS, threads, [&](int64_t begin, int64_t end) {
            for (int64_t j = begin; j < end; j += LANES) {
                Vec sum = load_some(exchange.buffer(0) + j, end - j);
                for (int64_t rank = 1; rank < ranks->size; rank++) sum += load_some(exchange.buffer(rank) + j, end - j);
                store_some(own + j, sum, end - j);
            }
        });
    }
}

// Writes to `out` [rows, sum of sizes] the columns of all ranks in their order; `part` [rows, sizes[rank]] is one's own.
// If the ranks are aborted, `out` is arbitrary.
void all_gather(Ranks* ranks, const float* part, const int64_t* sizes, int64_t rows, float* out, int threads) {
    int64_t total = 0, widest = 1;
    for (int64_t rank = 0; rank < ranks->size; rank++) {
        total += sizes[rank];
        widest = std::max(widest, sizes[rank]);
    }
    int64_t columns = std::min(widest, ranks->length), most = ranks->length / columns;
    for (int64_t left = 0; left < widest; left += columns)
        for (int64_t first = 0; first < rows; first += most) {
            auto width = [&](int64_t rank) { return std::clamp<int64_t>(sizes[rank] - left, 0, columns); };
            int64_t count = std::min(most, rows - first), whole = sizes[ranks->rank], own = width(ranks->rank);
            Exchange exchange(*ranks);
            parallel(count, SERIAL_NUMBERS / columns, threads, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++)
                    std::copy_n(part + (first + row) * whole + left, own, exchange.own() + row * own);
            });
            if (!exchange.share()) return;
            parallel(count, SERIAL_NUMBERS / total, threads, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) {
                    float* to = out + (first + row) * total + left;
                    for (int64_t rank = 0; rank < ranks->size; to += sizes[rank++])
                        std::copy_n(exchange.buffer(rank) + row * width(rank), width(rank), to);
                }
            });
        }
}

// Rank 0 begins a call, which the others wait for.
void begin_call(Ranks* ranks) { raise(ranks->segment->calls, ++ranks->calls); }

// Waits for the next call of rank 0; returns 0 if the ranks are aborted.
int64_t await_call(Ranks* ranks) { return wait_for(*ranks->segment, ranks->segment->calls, ++ranks->calls); }

// Ends a call of rank 0.
void end_call(Ranks* ranks) { raise(ranks->segment->ended[ranks->rank], ranks->calls); }

// Waits until the other ranks have ended all calls; returns 0 if the ranks are aborted.
int64_t await_others(Ranks* ranks) {
    for (int64_t rank = 1; rank < ranks->size; rank++)
        if (!wait_for(*ranks->segment, ranks->segment->ended[rank], ranks->calls)) return 0;
    return !is_aborted(*ranks->segment);
}

// Ends all waits, now and later. Any thread of any rank may call it.
void abort_ranks(Ranks* ranks) {
    Segment& segment = *ranks->segment;
    raise(segment.aborted, 1);
    wake(segment.calls);
    for (int64_t rank = 0; rank < ranks->size; rank++) {
        wake(segment.shared[rank]);
        wake(segment.ended[rank]);
    }
}

int64_t aborted(const Ranks* ranks) { return is_aborted(*ranks->segment); }
}
