"""Which choice each row of a step belongs to, and the effects of a step on the streams. No I/O.

The map is rebuilt from `Attach` messages: each binds the sequences of one request, and unbinds the ones before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.services.detokenizer.state.completion import StreamedChoice, TokenGap
from pagewire.services.detokenizer.state.stream import Stream
from pagewire.shared.messages import unpack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.step import ERRORS, NO_TOKEN, Finish, StepOutput

NO_DRAFTS = 0, 0
"""Numbers of drafted and of right tokens of a sequence without drafts."""


@dataclass(slots=True)
class StepEffects:
    """The effects of one step on the streams of this process."""

    touched: set[Stream] = field(default_factory=set)
    """Streams with new tokens."""
    ended: set[Stream] = field(default_factory=set)
    """Streams with a completion that has ended."""
    stopped: dict[Stream, list[int]] = field(default_factory=dict)
    """Sequences that a stop string has ended, which the device does not know yet."""
    gapped: set[Stream] = field(default_factory=set)
    """Streams that miss a token."""
    failing: list[tuple[Stream, StreamedChoice, Finish]] = field(default_factory=list)
    """Choices whose sequence could sample no token, and why."""
    tokens: int = 0
    """Number of tokens that were appended."""
    started: list[Stream] = field(default_factory=list)
    """Streams with a completion that got its first token."""
    before: dict[float, int] = field(default_factory=dict)
    """Number of rows with a new token, by the monotonic time at which the token before it was read."""

    @property
    def failed(self) -> dict[Stream, Finish]:
        """Streams that cannot end well, and why. A choice that a stop string has ended before needs no token more."""
        return {stream: error for stream, choice, error in self.failing if choice.finish is None}

    def note_before(self, at: float, rows: int) -> None:
        """Counts rows whose token before the new one was read at a time; 0: no token was, or elsewhere."""
        if at:
            self.before[at] = self.before.get(at, 0) + rows

    def note_end(self, stream: Stream, sequence: int, *, stopped: bool) -> None:
        """Notes a completion that has ended; `stopped`: by a stop string."""
        self.ended.add(stream)
        if stopped:
            self.stopped.setdefault(stream, []).append(sequence)


class SequenceMap:
    """The choice of each attached sequence."""

    def __init__(self) -> None:
        self._terms: dict[int, dict[int, tuple[Stream, StreamedChoice]]] = {}
        """Stream and choice of each sequence, by term and sequence id."""

    def bind(self, stream: Stream, choices: Sequence[StreamedChoice], attach: Attach) -> None:
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

    def apply(self, output: StepOutput, now: float, only: Stream | None = None) -> StepEffects:
        """Appends the tokens of a step, read at time `now`, to their choices; with `only`, to that stream's alone."""
        effects = StepEffects()
        sequences = self._terms.get(output.term)
        if sequences is None:
            return effects
        if only is not None:
            sequences = {sequence: bound for sequence, bound in sequences.items() if bound[0] is only}
        if output.logprob_tokens:
            _keep_logprobs(output, sequences)
        first, more = output.split_tokens()
        drafts = output.split_drafts() if output.drafts else {}
        rows, noted, further, last = 0, 0, 0, 0.0
        for sequence, start, count, token, finish in zip(
            memoryview(output.sequences).cast("I"),
            memoryview(output.starts).cast("I"),
            memoryview(output.counts).cast("I"),
            first,
            output.finishes,
            strict=True,
        ):
            bound = sequences.get(sequence)
            if bound is None:
                continue
            stream, choice = bound
            if finish and finish in ERRORS:
                effects.failing.append((stream, choice, Finish(finish)))
            if token == NO_TOKEN:
                _note_prompt(stream, choice, start, output.elapsed_us, token=False)
                continue
            position = start + count - choice.prompt_length
            if (more or drafts) and choice.origins is not None:
                choice.note_origins(position, 1 + len(more.get(sequence, ())), drafts.get(sequence, NO_DRAFTS)[1])
            try:
                if more and sequence in more:
                    new = _accept_all(choice, position, [token, *more[sequence]], finish)
                    further += max(0, new - 1)
                else:
                    new = choice.accept(position, token, finish)
            except TokenGap:
                effects.gapped.add(stream)
                continue
            if not new:
                continue
            effects.touched.add(stream)
            if drafts and sequence in drafts:
                stream.drafts.add(*drafts[sequence])
            before = choice.token_at
            if before != last:  # nearly all rows have their last tokens from the same step
                effects.note_before(last, rows - noted)
                last, noted = before, rows
            rows += 1
            choice.token_at = now
            if not before and len(choice.tokens) == new:
                effects.started.append(stream)
                _note_prompt(stream, choice, start, output.elapsed_us, token=True)
            if choice.finish is not None:
                effects.note_end(stream, sequence, stopped=finish == Finish.NONE)
        effects.note_before(last, rows - noted)
        effects.tokens = rows + further
        return effects


def _note_prompt(stream: Stream, choice: StreamedChoice, start: int, elapsed_us: int, *, token: bool) -> None:
    """Notes a row that has computed positions of a prompt, from `start` on; `token`: and sampled the first token."""
    stream.cached_tokens += choice.count_cached(start)
    stream.times.note_row(elapsed_us, token=token)


def _keep_logprobs(output: StepOutput, sequences: Mapping[int, tuple[Stream, StreamedChoice]]) -> None:
    """Hands the log-probabilities that a step reports to these sequences."""
    numbers = iter(unpack(output.logprob_tokens))
    begin = 0
    for sequence, position, count, rank in zip(numbers, numbers, numbers, unpack(output.logprob_ranks), strict=True):
        end = begin + 4 * count
        if sequence in sequences:
            logprobs = ReportedLogprobs(rank, output.logprob_ids[begin:end], output.logprob_values[begin:end])
            sequences[sequence][1].report(position, logprobs)
        begin = end


def _accept_all(choice: StreamedChoice, position: int, tokens: list[int], finish: int) -> int:
    """Appends the tokens of a row from `position` on, the last with `finish`; returns the number of new ones."""
    last = len(tokens) - 1
    return sum(
        choice.accept(position + i, token, finish if i == last else Finish.NONE) for i, token in enumerate(tokens)
    )
