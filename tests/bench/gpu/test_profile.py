"""Gaps are read off traces that are made by hand; times are microseconds."""

from typing import Any

import pytest

from pagewire.bench._gpu import profile as module
from pagewire.bench._gpu.plan import Cell
from pagewire.bench._gpu.profile import Gap, ProfileRun, profile, read, table
from pagewire.bench._gpu.steps import STEP
from tests.bench.gpu.cases import MACHINE, MODEL


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def step(launched: float, correlation: int, *work: tuple[float, float]) -> list[dict[str, Any]]:
    """A launch of 4 us in its annotation, and intervals of work that it leads to."""
    return [
        event("user_annotation", STEP, launched - 1, 6),
        event("cuda_runtime", "cudaGraphLaunch", launched, 4, correlation),
        *(event("kernel", "some", begin, end - begin, correlation) for begin, end in work),
    ]


def test_a_queued_step_has_a_small_gap_and_no_sync() -> None:
    trace = [
        *step(0, 1, (10, 60), (62, 100)),
        *step(20, 2, (103, 200)),
        event("cuda_runtime", "cudaEventSynchronize", 25, 90, 9),  # the host sleeps, but the work was there
    ]
    busy, gaps = read(trace)
    assert gaps == [Gap(2, 0, between=False, waited_for=""), Gap(3, 1, between=True, waited_for="")]
    assert busy == pytest.approx(1 - 5 / 190)


def test_a_step_that_is_launched_after_a_wait_is_a_host_sync() -> None:
    trace = [
        *step(0, 1, (10, 100)),
        event("cuda_runtime", "cudaStreamSynchronize", 5, 98, 9),
        *step(110, 2, (120, 200)),
    ]
    _, (gap,) = read(trace)
    assert gap == Gap(20, 1, between=True, waited_for="cudaStreamSynchronize")
    run = ProfileRun("m", 64, 2, 0.9, [gap])
    assert run.host_syncs == [gap]
    assert table([run])[-1] == "| m | 64 | 2 | 90.0% | 20.0 | 0.0 | 1 |"


def test_a_host_that_is_late_without_waiting_is_a_gap_but_no_sync() -> None:
    trace = [
        event("cuda_runtime", "cudaEventSynchronize", 0, 3, 9),
        *step(4, 1, (10, 100)),
        event("cuda_runtime", "cudaEventSynchronize", 105, 1, 10),  # what it asks for has long happened
        *step(110, 2, (120, 200)),
    ]
    _, (gap,) = read(trace)
    assert gap.between
    assert not gap.waited_for


def test_work_on_another_stream_fills_a_gap() -> None:
    trace = [*step(0, 1, (10, 100)), event("gpu_memcpy", "out", 95, 30, 1), *step(20, 2, (122, 200))]
    busy, gaps = read(trace)
    assert (busy, gaps) == (1.0, [])


def test_work_outside_of_all_steps_does_not_count() -> None:
    trace = [*step(0, 1, (10, 100)), event("kernel", "before", 1, 3, 77), event("gpu_memset", "late", 300, 3, 78)]
    trace.append(event("cuda_runtime", "cudaLaunchKernel", 290, 2, 78))
    assert read(trace) == (1.0, [])


def test_steps_that_warm_up_do_not_count() -> None:
    trace = [*step(0, 1, (10, 20)), *step(110, 2, (120, 200)), *step(130, 3, (205, 300))]
    busy, (gap,) = read(trace, skipped=1)
    assert gap == Gap(5, 2, between=True, waited_for="")
    assert busy == pytest.approx(1 - 5 / 180)


def test_a_trace_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match="no work of a step"):
        read([event("user_annotation", STEP, 0, 5)])


def test_a_model_that_does_not_fit_is_left_out() -> None:
    assert not list(profile(MACHINE, {"tiny": MODEL}, Cell(1 << 20, 4096), steps=2))


@pytest.mark.skipif(MACHINE.runtime.device.type != "cpu", reason="the interpreter is not there")
def test_steps_are_traced_and_the_trace_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_UP", 1)
    with pytest.raises(RuntimeError, match="no work of a step"):
        list(profile(MACHINE, {"tiny": MODEL}, Cell(1, 16), steps=2))
