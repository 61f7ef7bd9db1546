// Parallel loops whose parts are taken by any thread that is running.
//
// A loop never waits for a thread that has not begun: if other programs use the cores too, the caller runs the parts that
// no helper took. Helpers poll for work for about twenty microseconds, longer than the gaps between the loops of a
// call, and yield regularly meanwhile; then they sleep. An OpenMP loop waits for all threads, which takes up to ten
// times as long on two shared cores.
#pragma once

#include <algorithm>
#include <cstdint>

using Part = void (*)(void* context, int64_t index);

constexpr int64_t SERIAL_NUMBERS = 1 << 14;   // numbers below which starting a helper thread takes longer than the work
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;  // multiplications below which it does

// Tells the core that this thread polls.
inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls part(context, i) for each i below `count`, at most a million, on up to `threads` threads.
void run_parts(int64_t count, int threads, Part part, void* context);

// Calls body(begin, end) for ranges of about `grain` indices that together are [0, count).
template <typename Body>
void parallel(int64_t count, int64_t grain, int threads, Body body) {
    grain = std::max<int64_t>(grain, 1);
    if (threads == 1 || count <= grain) {
        if (count) body(int64_t(0), count);
        return;
    }
    struct Context {
        Body& body;
        int64_t count, parts;
    } context{body, count, std::min<int64_t>((count + grain - 1) / grain, 1 << 16)};
    run_parts(
        context.parts, threads,
        [](void* pointer, int64_t i) {
            Context& c = *(Context*)pointer;
            c.body(c.count * i / c.parts, c.count * (i + 1) / c.parts);
        },
        &context);
}
