"""Replicas in virtual time: everyone is served once, what is cached is used, and nobody works for all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.bench._common.loads import Request
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.shared.prefix_hashes import SPAN
from tests.tools.experiments.simulated_devices.virtual_time.cases import INSTANT, MACHINE, limits, request
from tools.experiments.simulated_devices.virtual_time.clock import Clock
from tools.experiments.simulated_devices.virtual_time.fleet import Fleet
from tools.experiments.simulated_devices.virtual_time.pipeline import VirtualPipeline


def run(replicas: int, requests: list[Request], slots: int = 16) -> Fleet:
    clock = Clock()
    ended: list[Request] = []

    def end(request: Request) -> None:
        ended.append(request)
        if len(ended) == len(requests):
            fleet.close()

    pipelines = [
        VirtualPipeline(limits(slots=slots), MACHINE, INSTANT, SlotTable, 4096, clock) for _ in range(replicas)
    ]
    fleet = Fleet(clock, pipelines, end)
    for sent in requests:
        clock.at(sent.at, fleet.send, sent)
    clock.run()
    for pipeline in pipelines:
        pipeline.finish()
    assert len(ended) == len(requests)
    return fleet


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_request_is_served_once(load: list[tuple[float, int, int]], replicas: int, slots: int) -> None:
    requests = [request(*parts, first=i) for i, parts in enumerate(load)]
    run(replicas, requests, slots)
    assert [len(r.tokens_at) for r in requests] == [r.output for r in requests]
    assert all(len(r.tokens) == r.output for r in requests)


def test_a_prompt_finds_the_replica_that_has_its_beginning() -> None:
    first = [request(0.01 * i, 4 * SPAN, 4, first=5_000 * i) for i in range(8)]
    again = [Request(5.0 + 0.5 * i, [*sent.prompt, 1, 2, 3], 4) for i, sent in enumerate(first)]
    fleet = run(4, first + again)
    assert all(sent.cached > 3 * SPAN for sent in again)
    assert all(fleet.computed)


def test_a_crowd_is_shared_before_any_replica_reports_its_load() -> None:
    crowd = [request(1.0 + i * 1e-4, 40, 10, first=100 * i) for i in range(400)]
    computed = run(4, crowd).computed
    assert max(computed) / (sum(computed) / 4) < 1.1


def test_earlier_counts_can_be_forgotten() -> None:
    fleet = run(2, [request(0.0, 40, 10)])
    assert sum(fleet.computed) == 50
    fleet.forget()
    assert fleet.computed == [0, 0]
