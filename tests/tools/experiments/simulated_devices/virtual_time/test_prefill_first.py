"""Both sides of the SplitFuse ablation, on the same trace."""

from pagewire.services.executor.steps.slot_table import SlotTable
from tests.tools.experiments.simulated_devices.virtual_time.cases import limits, request, serve
from tools.experiments.simulated_devices.virtual_time.prefill_first import PrefillFirst

CAP = 1024


def stall(table: type[SlotTable], budget: int) -> float:
    """The longest interval of a stream beside which a long prompt arrives."""
    stream, prompt = request(0, 10, 40), request(0.1, 1000, 1, first=50)
    serve(stream, prompt, table=table, within=limits(budget=budget))
    return max(stream.intervals)


def test_a_long_prompt_stalls_decodes_only_when_it_goes_first_and_whole() -> None:
    assert stall(SlotTable, 128) <= 10e-3 + 128 * 10e-6 + 1e-6  # reading the context takes its time too
    assert stall(PrefillFirst, CAP) >= 10e-3 + 1000 * 10e-6 + 10e-3


def test_splitfuse_decodes_in_every_step() -> None:
    stream, prompt = request(0, 10, 40), request(0.1, 1000, 1, first=50)
    trace = serve(stream, prompt)
    assert len(stream.tokens_at) == trace.steps


def test_steps_hold_as_many_whole_prompts_as_the_cap() -> None:
    prompts = [request(0, 400, 1, first=500 * i) for i in range(5)]
    trace = serve(*prompts, table=PrefillFirst, within=limits(budget=CAP))
    ends = sorted({round(r.tokens_at[0], 9) for r in trace.requests})
    assert [sum(round(r.tokens_at[0], 9) == end for r in trace.requests) for end in ends] == [2, 2, 1]


def test_the_order_is_that_of_arrival() -> None:
    prompts = [request(1e-6 * i, 900 - 90 * i, 1, first=1000 * i) for i in range(4)]
    trace = serve(*prompts, table=PrefillFirst, within=limits(budget=CAP))
    assert trace.requests == prompts


def test_a_prompt_beyond_the_cap_runs_alone() -> None:
    trace = serve(request(0, 1500, 3), request(0, 20, 3, first=5), table=PrefillFirst, within=limits(budget=CAP))
    assert sorted(len(r.tokens_at) for r in trace.requests) == [3, 3]


def test_without_prompts_both_schedulers_give_the_same_times() -> None:
    load = [(0, 10, 30), (0.5, 10, 30)]
    both = [
        serve(*(request(*parts, first=50 * i) for i, parts in enumerate(load)), table=table)
        for table in (SlotTable, PrefillFirst)
    ]
    assert both[0].requests[0].tokens_at == both[1].requests[0].tokens_at
