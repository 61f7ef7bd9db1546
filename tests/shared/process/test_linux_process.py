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


@pytest.mark.anyio
async def test_a_busy_process_waits_for_a_core_and_a_stopped_one_does_not() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", spin) for _ in range(2)]
    starved = processes[0].pid
    try:
        await until(lambda: seconds_without_core(starved) > 0.2)
        os.kill(starved, signal.SIGSTOP)
        await until(lambda: Path(f"/proc/{starved}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        waited, computed = seconds_without_core(starved), cpu_seconds(starved)
        assert computed > 0
        await asyncio.sleep(0.3)
        assert (seconds_without_core(starved), cpu_seconds(starved)) == (waited, computed)
    finally:
        for process in processes:
            process.kill()
            await process.wait()
    assert (seconds_without_core(starved), cpu_seconds(starved)) == (0, 0), "it has ended"
