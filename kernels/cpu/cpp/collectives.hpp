// Sums over the ranks of a model: processes of one machine that each compute a part of it and share memory.
//
// Ranks wait by stamps, numbers that only grow: a rank raises its own when its numbers lie in its buffer. A rank that
// waits polls for about twenty microseconds and then sleeps until the stamp is raised, so that ranks which share a core
// do not take it from each other.
#pragma once

#include <atomic>
#include <cstdint>

constexpr int64_t MAX_RANKS = 64;

// A number that one rank raises and others wait for.
struct alignas(64) Stamp {
    std::atomic<uint32_t> value, sleepers;
};

// The beginning of the shared memory, zeros at first.
struct Segment {
    Stamp aborted;             // 1: a rank is lost, nobody waits any more
    Stamp calls;               // calls that rank 0 has begun
    Stamp shared[MAX_RANKS];   // exchanges for which a rank's numbers lie in its buffer
    Stamp ended[MAX_RANKS];    // calls that a rank has ended
};

// A process's view of all ranks.
struct Ranks {
    Segment* segment;
    float* buffers;  // [2, size, length]: a rank's buffer of even and of odd exchanges
    int64_t length;
    int64_t rank, size;
    uint32_t exchanges, calls;  // begun so far by this rank
};

extern "C" {

// Replaces x by the sum of all ranks' x, added in the order of the ranks. If the ranks are aborted, x is arbitrary.
void all_reduce(Ranks* ranks, float* x, int64_t count, int threads);
}
