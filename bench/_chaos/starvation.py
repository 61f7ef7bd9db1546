"""Takes the cores away from a process, or from all."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

SLICE, PERIOD = 0.005, 0.1
"""Seconds that a starved process runs, and seconds of the period in which it does so once: a twentieth of a core."""
BUSY_PROCESSES = 16
"""Processes that compete for the cores of a busy machine."""


async def starve(pid: int, seconds: float) -> None:
    """Lets a process run for a slice of each period, as a cgroup with so small a share does."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    with suppress(ProcessLookupError):  # it was given up and killed meanwhile
        try:
            while loop.time() < end:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(PERIOD - SLICE)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(SLICE)
        finally:
            os.kill(pid, signal.SIGCONT)


async def occupy_cores(seconds: float) -> None:
    """Keeps all cores of the machine busy with processes that only count."""
    spin = "while True: pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", spin) for _ in range(BUSY_PROCESSES)]
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
