"""Spans of traced sequences: one for prefill, one for decode, none for the others; and of some of their steps."""

from collections.abc import Sequence

from opentelemetry.util.types import AttributeValue

from pagewire.services.executor.outputs.results import StepResult
from pagewire.services.executor.spans import Spans
from pagewire.shared.messages import pack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from tests.services.executor.fakes import add, plan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = PARENT.replace("0af7", "1af7")
Row = tuple[int, int, Finish]


class Recorder:
    """Spans as they are recorded, and a clock of one second per step."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float, dict[str, AttributeValue]]] = []
        self.steps: list[tuple[float, dict[str, AttributeValue], list[str]]] = []
        self.spans = Spans(self.record)
        self.step = 0

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: dict[str, AttributeValue],
        linked: Sequence[str],
    ) -> None:
        assert parent in {PARENT, OTHER}
        if name == "step":
            self.steps.append((start, attributes, list(linked)))
        else:
            self.found.append((name, start, end, attributes))

    def ran(self, *rows: Row, plans: list[Plan] | None = None, term: int = 1) -> None:
        """Step s runs from second 100 + s to 100.5 + s."""
        output = StepOutput(
            term=term,
            step=self.step,
            plan=0,
            sequences=pack([row[0] for row in rows]),
            starts=pack([0] * len(rows)),
            counts=pack([1] * len(rows)),
            tokens=pack([row[1] for row in rows]),
            finishes=bytes(row[2] for row in rows),
            elapsed_us=500_000,
        )
        began = 100.0 + self.step
        self.spans.observe(StepResult(output, plans or [], began, began + 0.5))
        self.step += 1


def test_a_sequence_has_a_prefill_span_and_a_decode_span() -> None:
    recorder = Recorder()
    traced = add(0, 7, [1, 2, 3, 4], [0], computed=1, trace=PARENT)
    recorder.ran(plans=[plan(1, traced)])
    recorder.ran((7, NO_TOKEN, Finish.NONE))
    recorder.ran((7, 5, Finish.NONE))
    recorder.ran((7, 6, Finish.NONE))
    recorder.ran((7, 2, Finish.STOP))
    assert recorder.found == [
        ("prefill", 101.0, 102.5, {"sequence": 7, "tokens": 3, "cached_tokens": 1}),
        ("decode", 102.5, 104.5, {"sequence": 7, "finish": "stop"}),
    ]


def test_a_removal_ends_decode() -> None:
    recorder = Recorder()
    recorder.ran((7, 5, Finish.NONE), plans=[plan(1, add(2, 7, [1], [0], trace=PARENT))])
    recorder.ran(plans=[plan(2, removed=[2])])
    recorder.ran(plans=[plan(3, add(2, 8, [1], [0]))])
    assert [span[:3] for span in recorder.found] == [("prefill", 100.0, 100.5), ("decode", 100.5, 101.0)]
    assert recorder.found[1][3]["finish"] == "removed"


def test_a_finished_sequence_is_not_ended_again_by_its_removal() -> None:
    recorder = Recorder()
    recorder.ran((7, 5, Finish.LENGTH), plans=[plan(1, add(2, 7, [1], [0], trace=PARENT))])
    recorder.ran(plans=[plan(2, removed=[2])])
    assert [span[0] for span in recorder.found] == ["prefill", "decode"]


def test_a_sequence_that_leaves_before_its_first_token_has_no_span() -> None:
    recorder = Recorder()
    recorder.ran((7, NO_TOKEN, Finish.NONE), plans=[plan(1, add(2, 7, [1, 2], [0], trace=PARENT))])
    recorder.ran(plans=[plan(2, removed=[2])])
    recorder.ran((7, 5, Finish.NONE))
    assert recorder.found == []


def test_a_new_term_ends_the_spans_of_the_old_one() -> None:
    recorder = Recorder()
    recorder.ran((7, 5, Finish.NONE), plans=[plan(1, add(2, 7, [1], [0], trace=PARENT))])
    recorder.ran(plans=[plan(1, add(2, 7, [1], [0], trace=PARENT))], term=2)
    recorder.ran((7, 5, Finish.NONE), term=2)
    assert [span[0] for span in recorder.found] == ["prefill", "decode", "prefill"]


def test_untraced_sequences_leave_no_spans_beside_traced_ones() -> None:
    recorder = Recorder()
    both = plan(1, add(0, 7, [1], [0]), add(1, 8, [1], [1], trace=PARENT))
    recorder.ran((7, 5, Finish.NONE), (8, 5, Finish.NONE), plans=[both])
    recorder.ran((7, 5, Finish.STOP), (8, 5, Finish.NONE))
    recorder.ran((8, 5, Finish.LENGTH))
    assert [(span[0], span[3]["sequence"]) for span in recorder.found] == [("prefill", 8), ("decode", 8)]


def test_at_most_ten_step_spans_a_second_link_to_all_traces() -> None:
    recorder = Recorder()

    both = plan(1, add(0, 7, [1], [0], trace=PARENT), add(1, 8, [1], [1], trace=OTHER), add(2, 9, [1], [2]))
    rows = [(i, 5, Finish.NONE) for i in (7, 8, 9)]
    recorder.ran(*rows, plans=[both])
    recorder.step = 0
    recorder.ran(*rows)
    recorder.ran(*rows)
    about = {"term": 1, "step": 0, "rows": 3, "tokens": 3, "prefill_tokens": 0}
    assert recorder.steps == [(100.0, about, [OTHER]), (101.0, about | {"step": 1}, [OTHER])]


def test_steps_without_traced_sequences_have_no_span() -> None:
    recorder = Recorder()
    recorder.ran((7, NO_TOKEN, Finish.NONE), plans=[plan(1, add(0, 7, [1, 2], [0], trace=PARENT))])
    recorder.steps.clear()
    recorder.ran((8, 5, Finish.NONE))
    assert recorder.steps == []
