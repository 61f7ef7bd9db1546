"""A clock of the services that is wrong: a small library that is compiled here and loaded before all others.

Only the time of day is wrong; durations and sleeps stay right, since they are measured by other clocks.
"""

import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPILER = shutil.which("cc")
"""Path of the C compiler; None: there is none."""
OFFSET = "FALSE_CLOCK_OFFSET"
"""Environment variable with the file that holds the seconds by which the clock is ahead, a double."""
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile double *offset;

__attribute__((constructor)) static void load(void) {
    int file = open(getenv("FALSE_CLOCK_OFFSET"), O_RDONLY);
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*right)(clockid_t, struct timespec *);
    if (!right) right = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int failed = right(clock, now);
    if (!failed && offset && clock == CLOCK_REALTIME) now->tv_sec += (time_t) *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void) zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class FalseClock:
    """The offset of all processes that are started while it is in the environment."""

    def __init__(self, offset: mmap.mmap) -> None:
        self._offset = offset

    def set(self, seconds: float) -> None:
        """Sets by how many seconds the processes' clocks are ahead."""
        self._offset[:] = struct.pack("d", seconds)


@contextmanager
def false_clock() -> Iterator[FalseClock]:
    """Has processes that are started inside the block read a wrong clock.

    Programs that are linked statically, such as nats-server, keep the right time.
    """
    assert COMPILER is not None, "there is no C compiler"
    with tempfile.TemporaryDirectory() as folder:
        library, file = Path(folder, "false_clock.so"), Path(folder, "offset")
        options = ("-shared", "-fPIC", "-O2", "-x", "c", "-o", str(library), "-", "-ldl")
        subprocess.run([COMPILER, *options], input=SOURCE, text=True, check=True)
        file.write_bytes(struct.pack("d", 0.0))
        variables = {"LD_PRELOAD": str(library), OFFSET: str(file)}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as offset:
                yield FalseClock(offset)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
