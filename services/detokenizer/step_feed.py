"""The steps of every executor in order, and which stream each of their rows belongs to."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from pagewire.services.detokenizer.stream import Choice, Stream, TokenGap
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.errors import BusError
from pagewire.shared.messages import UNREADABLE, Decoder, encode, unpack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.done import TokenLogprobs
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Replay
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.step_reader import StepReader

MAX_EXECUTORS = 64
"""Executors that are read at once; one more replaces the executor with the oldest term."""
STALL = 1.0
"""Seconds without a message after which a replay has failed."""

_log = structlog.get_logger()
_step = Decoder(StepOutput)
_heartbeat = Decoder(Heartbeat)


class StepFeed:
    """Reads the steps of every executor in order, and asks for a replay of those that were lost."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, on_output: Callable[[StepOutput], None]) -> None:
        self._bus = bus
        self._tasks = tasks
        self._on_output = on_output
        self._readers: dict[str, StepReader] = {}
        self._replaying: set[str] = set()

    @property
    def positions(self) -> dict[int, int]:
        """The last step read of each term."""
        return {reader.term: reader.last for reader in self._readers.values()}

    async def subscribe(self) -> list[Subscription]:
        """Subscribes to steps and to the heartbeats of executors."""
        return [
            await self._bus.subscribe(f"{subjects.STEPS}.*", self._on_step),
            await self._bus.subscribe(f"{subjects.HEARTBEAT}.executor.*", self._on_heartbeat),
        ]

    def _on_step(self, message: Message) -> None:
        output = _step.read(message)
        if output is None:
            return
        executor = message.subject.rpartition(".")[2]
        reader = self._readers.get(executor) or self._add_reader(executor)
        for ready in reader.feed(output):
            self._on_output(ready)
        if reader.missing is not None:
            self._start_replay(executor, reader)

    def _add_reader(self, executor: str) -> StepReader:
        if len(self._readers) >= MAX_EXECUTORS:
            del self._readers[min(self._readers, key=lambda name: self._readers[name].term)]
        reader = self._readers[executor] = StepReader()
        return reader

    def _on_heartbeat(self, message: Message) -> None:
        """Notices that the last step of an executor was lost: no later step reveals the gap."""
        beat = _heartbeat.try_decode(message.data)
        reader = self._readers.get(beat.instance) if beat is not None else None
        if beat is None or reader is None:
            return
        reader.note_run(beat.term, beat.step)
        if reader.missing is not None:
            self._start_replay(beat.instance, reader)

    def _start_replay(self, executor: str, reader: StepReader) -> None:
        if executor not in self._replaying:
            self._replaying.add(executor)
            self._tasks.create_task(self._replay(executor, reader))

    async def _replay(self, executor: str, reader: StepReader) -> None:
        """Asks for the missing steps until none are missing. Steps that the executor has no longer are skipped."""
        try:
            while (missing := reader.missing) is not None:
                request = encode(Replay(reader.term, *missing))
                async for message in self._bus.request_many(f"{subjects.REPLAY}.{executor}", request, stall=STALL):
                    for ready in reader.feed(_step.decode(message.data)):
                        self._on_output(ready)
                if reader.missing == missing:
                    skipped_to = reader.skip()
                    if not skipped_to:
                        return
                    _log.error("steps_lost", executor=executor, term=reader.term, first=missing[0], last=missing[1])
                    for ready in skipped_to:
                        self._on_output(ready)
        except (BusError, *UNREADABLE) as error:
            # The next step or heartbeat tries again; without either, the scheduler declares the executor lost.
            _log.warning("replay_failed", executor=executor, reason=str(error))
        finally:
            self._replaying.discard(executor)


@dataclass(slots=True)
class StepEffects:
    """What one step did to the streams here."""

    touched: set[Stream] = field(default_factory=set)
    """Streams with new tokens."""
    ended: set[Stream] = field(default_factory=set)
    """Streams of which a completion has ended."""
    stopped: dict[Stream, list[int]] = field(default_factory=dict)
    """Sequences that a stop string has ended: the device does not know yet."""
    gapped: set[Stream] = field(default_factory=set)
    """Streams that have lost a token."""
    not_finite: set[Stream] = field(default_factory=set)
    """Streams with a sequence whose logits were not finite."""
    tokens: int = 0
    """Tokens that were appended."""


def _reported(output: StepOutput) -> Iterator[tuple[int, int, TokenLogprobs]]:
    """Yields sequence, position and log-probabilities of each token that the step reports them of."""
    numbers = iter(unpack(output.logprob_tokens))
    begin = 0
    for sequence, position, count, rank in zip(numbers, numbers, numbers, unpack(output.logprob_ranks), strict=True):
        end = begin + 4 * count
        yield sequence, position, TokenLogprobs(rank, output.logprob_ids[begin:end], output.logprob_values[begin:end])
        begin = end


class SequenceMap:
    """The choice of each sequence, by term. Only the last attachment of a stream counts."""

    def __init__(self) -> None:
        self._terms: dict[int, dict[int, tuple[Stream, Choice]]] = {}

    def bind(self, stream: Stream, choices: Sequence[Choice], attach: Attach) -> None:
        """Assigns the sequences of an attachment to the choices of a stream."""
        sequences = self._terms.setdefault(attach.term, {})
        for sequence, choice in enumerate(choices, attach.first_sequence):
            sequences[sequence] = stream, choice

    def unbind(self, stream: Stream, attach: Attach) -> None:
        """Removes the sequences of an attachment: their rows are ignored from now on."""
        sequences = self._terms.get(attach.term, {})
        for sequence in range(attach.first_sequence, attach.first_sequence + len(stream.completions)):
            sequences.pop(sequence, None)
        if not sequences:
            self._terms.pop(attach.term, None)

    def apply(self, output: StepOutput) -> StepEffects:
        """Appends the tokens of a step to their choices."""
        effects = StepEffects()
        sequences = self._terms.get(output.term)
        if sequences is None:
            return effects
        if output.logprob_tokens:
            for sequence, position, logprobs in _reported(output):
                if sequence in sequences:
                    sequences[sequence][1].report(position, logprobs)
        for sequence, start, count, token, finish in zip(
            memoryview(output.sequences).cast("I"),
            memoryview(output.starts).cast("I"),
            memoryview(output.counts).cast("I"),
            memoryview(output.tokens).cast("I"),
            output.finishes,
            strict=True,
        ):
            bound = sequences.get(sequence)
            if bound is None:
                continue
            stream, choice = bound
            if token == NO_TOKEN:
                if finish == Finish.NOT_FINITE:
                    effects.not_finite.add(stream)
                    continue
                stream.cached_tokens += choice.count_cached(start)
                continue
            try:
                new = choice.accept(start + count - choice.prompt_length, token, finish)
            except TokenGap:
                effects.gapped.add(stream)
                continue
            if not new:
                continue
            effects.tokens += 1
            effects.touched.add(stream)
            if len(choice.tokens) == 1:
                stream.cached_tokens += choice.count_cached(start)
            if choice.finish is not None:
                effects.ended.add(stream)
                if finish == Finish.NONE:
                    effects.stopped.setdefault(stream, []).append(sequence)
        return effects
