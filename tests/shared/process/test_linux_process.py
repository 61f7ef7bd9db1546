"""Facts about a process that Linux tells, and calls that it may refuse."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.shared.process.linux_process import TRANSPARENT, cpu_seconds, seconds_without_core, use_batch_scheduling
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")


@pytest.mark.parametrize("refusal", [PermissionError("seccomp"), OSError(22, "not this policy")])
def test_a_sandbox_may_refuse_batch_scheduling(monkeypatch: pytest.MonkeyPatch, refusal: OSError) -> None:
    policies: list[int] = []

    def refuse(_: int, policy: int, __: os.sched_param) -> None:
        policies.append(policy)
        raise refusal

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    use_batch_scheduling()
    assert policies == [os.SCHED_BATCH]


SPIN = "while True: pass"
SPIN_BESIDE_MAIN = f"import threading; threading.Thread(target=exec, args=['{SPIN}']).start()"
"""The main thread waits for the one that computes."""


@pytest.mark.anyio
@pytest.mark.parametrize("program", [SPIN, SPIN_BESIDE_MAIN])
async def test_a_busy_process_waits_for_a_core_and_a_stopped_one_does_not(program: str) -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\n{program}"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", spin) for _ in range(2)]
    starved = processes[0].pid
    try:
        await until(lambda: seconds_without_core(starved) > 0.2)
        os.kill(starved, signal.SIGSTOP)
        await until(lambda: {_state(file) for file in Path(f"/proc/{starved}/task").glob("*/stat")} == {"T"})
        waited, computed = seconds_without_core(starved), cpu_seconds(starved)
        assert computed > 0
        await asyncio.sleep(0.3)
        assert (seconds_without_core(starved), cpu_seconds(starved)) == (waited, computed)
    finally:
        for process in processes:
            process.kill()
            await process.wait()
    assert (seconds_without_core(starved), cpu_seconds(starved)) == (0, 0), "it has ended"


def _state(stat: Path) -> str:
    """The state of a thread, of its file `stat`."""
    return stat.read_text().rpartition(")")[2].split()[0]


HUGE = """
import mmap, re
from pathlib import Path
from pagewire.shared.process.linux_process import use_huge_pages

def huge():
    return int(re.search(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = bytes(range(256)) * (256 << 10)
before = huge()
use_huge_pages()
print(huge() - before, memory[:] == bytes(range(256)) * (256 << 10))
"""


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1)
    or not TRANSPARENT.exists()
    or "[never]" in TRANSPARENT.read_text(),
    reason="this system moves no memory into huge pages",
)
def test_memory_moves_into_huge_pages_and_keeps_its_content() -> None:
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    kilobytes, same = done.stdout.split()
    assert int(kilobytes) > 32 << 10
    assert same == "True"
