// Loops whose parts are taken by whichever threads are running.
//
// Nobody waits for a thread that does not run: where other programs use the cores too, the caller does the parts that
// no helper took. Helpers look out for work for some twenty microseconds, longer than the gaps between the loops of a
// call, giving way to others all the while; then they sleep. With OpenMP a loop ends when every thread has come to its
// end, which on two shared cores took up to ten times as long.
#pragma once

#include <algorithm>
#include <cstdint>

using Part = void (*)(void* context, int64_t index);

// Calls part(context, i) for each i below `count`, at most a million, on up to `threads` threads.
void run_parts(int64_t count, int threads, Part part, void* context);

// Calls body(begin, end) for ranges of about `grain` that make up [0, count).
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
