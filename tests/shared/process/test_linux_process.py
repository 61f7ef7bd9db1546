"""Facts about a process that Linux tells, and calls that it may refuse."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from pagewire.shared.process.linux_process import cpu_seconds, seconds_without_core, use_batch_scheduling
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
