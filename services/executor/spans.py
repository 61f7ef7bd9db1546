"""Spans of traced sequences, made from step outputs afterwards: one for prefill, one for decode, and some of steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.util.types import AttributeValue

from pagewire.services.executor.outputs.results import StepResult
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.telemetry import tracing

STEP_INTERVAL = 0.1
"""Seconds between two steps that get a span."""

Record = Callable[[str, str, float, float, dict[str, AttributeValue], Sequence[str]], None]


@dataclass(slots=True)
class _Life:
    """A traced sequence in its slot."""

    added: AddSlot
    began: float | None = None
    """Start of the first step, Unix time in seconds."""
    answered: float | None = None
    """End of the step that sampled the first token, Unix time in seconds."""


class Spans:
    """Records spans of the sequences whose `AddSlot` names a trace. Costs nothing per step while there are none.

    A step that gets a span has traced sequences: it belongs to the trace of the first, and is linked to the others'.
    """

    def __init__(self, record: Record = tracing.span) -> None:
        self._record = record
        self._term = 0
        self._slots: dict[int, _Life] = {}
        self._prefilling: dict[int, _Life] = {}
        self._decoding: dict[int, _Life] = {}
        self._next_step = 0.0
        """Unix time in seconds before which no step gets a span."""

    def observe(self, result: StepResult) -> None:
        """Processes one result of the step loop."""
        if result.output.term != self._term:
            self._term = result.output.term
            for slot in list(self._slots):
                self._remove(slot, result.began)
        for plan in result.plans:
            for slot in unpack(plan.removed):
                self._remove(slot, result.began)
            for added in plan.added:
                if added.trace:
                    self._slots[added.slot] = self._prefilling[added.sequence] = _Life(added)
        if (self._prefilling or self._decoding) and result.began >= self._next_step:
            self._record_step(result.output, result.began, result.ended)
        if self._prefilling or (self._decoding and any(result.output.finishes)):
            self._read_rows(result.output, result.began, result.ended)

    def _record_step(self, output: StepOutput, began: float, ended: float) -> None:
        traced = self._prefilling | self._decoding
        sequences = unpack(output.sequences)
        traces = list(dict.fromkeys(traced[i].added.trace for i in sequences if i in traced))
        if traces:
            counts = unpack(output.counts)
            about: dict[str, AttributeValue] = {
                "term": output.term,
                "step": output.step,
                "rows": len(sequences),
                "tokens": sum(counts),
                "prefill_tokens": sum(count for count in counts if count > 1),
            }
            self._record("step", traces[0], began, ended, about, traces[1:])
            self._next_step = began + STEP_INTERVAL

    def _read_rows(self, output: StepOutput, began: float, ended: float) -> None:
        """Follows the traced sequences through the rows of a step."""
        tokens, _ = output.split_tokens()
        for sequence, token, finish in zip(unpack(output.sequences), tokens, output.finishes, strict=True):
            life = self._prefilling.get(sequence)
            if life is not None:
                life.began = life.began or began
                if token != NO_TOKEN:
                    self._begin_decode(life, ended)
            if finish != Finish.NONE and sequence in self._decoding:
                self._end(self._decoding[sequence], ended, Finish(finish).name.lower())

    def _begin_decode(self, life: _Life, now: float) -> None:
        """Records the prefill of a sequence that has its first token."""
        added = life.added
        computed = len(added.tokens) // 4 - added.computed
        self._span("prefill", life, life.began or now, now, {"tokens": computed, "cached_tokens": added.computed})
        life.answered = now
        self._decoding[added.sequence] = self._prefilling.pop(added.sequence)

    def _remove(self, slot: int, now: float) -> None:
        life = self._slots.pop(slot, None)
        if life is None:
            return
        self._prefilling.pop(life.added.sequence, None)
        if life.added.sequence in self._decoding:
            self._end(life, now, "removed")

    def _end(self, life: _Life, now: float, reason: str) -> None:
        del self._decoding[life.added.sequence]
        self._span("decode", life, life.answered or now, now, {"finish": reason})

    def _span(self, name: str, life: _Life, start: float, end: float, about: dict[str, AttributeValue]) -> None:
        self._record(name, life.added.trace, start, end, {"sequence": life.added.sequence, **about}, ())
