"""Virtual time: when things happen, and that real time has them in the same order."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.bench._common.loads import Request
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.sim.device import SimDevice
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import NO_TOKEN
from pagewire.shared.messages.work import Sampling
from tests.tools.experiments.simulated_devices.virtual_time.cases import INSTANT, MACHINE, limits, request, serve
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, VirtualPipeline


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    trace = serve(request(0.5, prompt=100, output=4))
    (served,) = trace.requests
    assert served.ttft == pytest.approx(10e-3 + 100 * 10e-6)
    assert served.intervals == pytest.approx([10e-3 + 10e-6] * 3)
    assert served.latency == pytest.approx(41.03e-3)
    assert trace.busy == pytest.approx(trace.working) == pytest.approx(41.03e-3)
    assert (trace.steps, trace.rows) == (4, 4)


def test_a_long_prompt_is_split_to_the_budget() -> None:
    (served,) = serve(request(0, prompt=300, output=1)).requests
    assert served.ttft == pytest.approx(3 * 10e-3 + 300 * 10e-6)


def test_an_arrival_waits_for_the_running_and_the_queued_step() -> None:
    first, late = request(0, 10, 50), request(25e-3, 10, 1, first=100)
    serve(first, late)
    steps = [at for at in first.tokens_at if at > late.at]
    assert late.tokens_at[0] == pytest.approx(steps[2])


def test_one_step_at_a_time_has_the_host_between_two_steps() -> None:
    host = replace(INSTANT, step=2e-3, step_row=1e-3)
    both = [serve(request(0, 10, 20), host=replace(host, asynchronous=on)) for on in (True, False)]
    assert both[0].requests[0].intervals[-1] == pytest.approx(10.01e-3)
    assert both[1].requests[0].intervals[-1] == pytest.approx(13.01e-3)
    assert both[1].busy / both[1].working == pytest.approx(10.01 / 13.01, rel=0.01)


@pytest.mark.parametrize(("window", "interval"), [(1, 16.01e-3), (2, 10.01e-3), (8, 10.01e-3)])
def test_a_window_of_two_hides_the_scheduler(window: int, interval: float) -> None:
    host = replace(INSTANT, schedule=4e-3, round_trip=2e-3)
    (served,) = serve(request(0, 10, 40), host=host, within=limits(window=window)).requests
    assert np.median(served.intervals) == pytest.approx(interval)


def test_a_scheduler_is_one_thread() -> None:
    """Ten arrivals at once cost it ten times; none is handed to the executor before its turn."""
    host = replace(INSTANT, schedule=30e-3)
    served = serve(*(request(0, 10, 1, first=10 * i) for i in range(10)), host=host).requests
    assert min(r.ttft for r in served) == pytest.approx(30e-3 + 10.1e-3)
    assert max(r.ttft for r in served) >= 300e-3


def test_a_closed_loop_sends_the_next_request_at_the_end_of_the_last() -> None:
    left = [request(0, 10, 5, first=100), request(0, 10, 5, first=200)]

    def following(ended: Request) -> Request | None:
        if not left:
            return None
        left[0].at = ended.tokens_at[-1]
        return left.pop(0)

    trace = VirtualPipeline(limits(), MACHINE, INSTANT, SlotTable, 64).run([request(0, 10, 5)], following)
    assert [len(r.tokens_at) for r in trace.requests] == [5, 5, 5]
    assert trace.requests[2].at == trace.requests[1].tokens_at[-1]


def test_a_small_pool_preempts_and_still_serves_every_request() -> None:
    crowd = [request(i * 1e-3, 40, 60, first=100 * i) for i in range(8)]
    trace = serve(*crowd, within=limits(blocks=24))
    assert trace.preemptions > 0
    assert sorted(len(r.tokens_at) for r in trace.requests) == [60] * 8


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_every_request_gets_all_tokens_in_order(
    load: list[tuple[float, int, int]], window: int, asynchronous: bool
) -> None:
    host = Host(asynchronous=asynchronous)
    trace = serve(*(request(*parts, first=i) for i, parts in enumerate(load)), host=host, within=limits(window=window))
    assert len(trace.requests) == len(load)
    for served in trace.requests:
        assert len(served.tokens_at) == served.output
        assert served.at < served.tokens_at[0]
        assert served.tokens_at == sorted(served.tokens_at)
    assert 0 < trace.busy <= trace.working + 1e-9


def milestones(requests: list[Request]) -> list[tuple[str, int]]:
    """First tokens and ends, in order of time."""
    marks = [(r.tokens_at[0], "first", i) for i, r in enumerate(requests)]
    marks += [(r.tokens_at[-1], "last", i) for i, r in enumerate(requests)]
    return [(kind, i) for _, kind, i in sorted(marks)]


def test_real_time_has_the_same_order() -> None:
    """The step loop on its thread and a device that sleeps, beside the same trace in virtual time."""
    shapes = [(0.0, 300, 30), (0.015, 40, 60), (0.1, 800, 3), (0.28, 10, 60), (0.45, 200, 2)]
    virtual, real = ([request(*parts, first=100 * i) for i, parts in enumerate(shapes)] for _ in range(2))
    serve(*virtual)
    _serve_in_real_time(real)
    assert milestones(real) == milestones(virtual)
    for one, other in zip(real, virtual, strict=True):
        assert one.latency > other.latency - 0.025, "real time was faster than the device"


def _serve_in_real_time(requests: list[Request]) -> None:
    within = limits()
    capacity = Capacity(within.num_blocks, within.block_size, within.max_num_seqs, 4096, 50_000)
    inbox, outputs = PlanInbox(), queue.Queue[StepResult | PlanRefused]()
    policy = Policy(1, within)
    inbox.begin(1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(StepLoop(SimDevice(capacity, MACHINE), inbox, outputs.put).run)
        began, left, open_ = time.monotonic(), list(enumerate(requests)), len(requests)
        while open_:
            now = time.monotonic() - began
            if left and left[0][1].at <= now:
                number, sent = left.pop(0)
                sampling = Sampling(sent.output, seed=number)
                policy.add(Sequence(number, list(sent.prompt), len(sent.prompt), sampling, arrival_order=number))
            else:
                try:
                    ran = outputs.get(timeout=left[0][1].at - now if left else 10.0)
                except queue.Empty:
                    assert left, "no step for ten seconds"
                    continue
                assert isinstance(ran, StepResult)
                policy.on_step(ran.output)
                at = time.monotonic() - began
                for sequence, token in zip(unpack(ran.output.sequences), unpack(ran.output.tokens), strict=True):
                    if token != NO_TOKEN:
                        requests[sequence].tokens_at.append(at)
                open_ -= sum(map(bool, ran.output.finishes))
            while (plan := policy.schedule(0.0, None).plan) is not None:
                inbox.put(plan)
        inbox.close()
