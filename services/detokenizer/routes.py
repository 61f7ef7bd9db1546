"""Which stream the rows of a step belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.services.detokenizer.choice import Choice, TokenGap
from pagewire.services.detokenizer.stream import Stream
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput


@dataclass(slots=True)
class Progress:
    """What one step meant to the streams here."""

    touched: set[Stream] = field(default_factory=set)
    """Streams with new tokens."""
    ended: set[Stream] = field(default_factory=set)
    """Streams of which a completion has ended."""
    stopped: dict[Stream, list[int]] = field(default_factory=dict)
    """Sequences whose text has ended before the device knew."""
    gapped: set[Stream] = field(default_factory=set)
    """Streams that have lost a token."""
    tokens: int = 0
    """Tokens taken in."""


class Routes:
    """The choice behind each sequence, by term. Only the last attachment of a stream counts."""

    def __init__(self) -> None:
        self._terms: dict[int, dict[int, tuple[Stream, Choice]]] = {}

    def bind(self, stream: Stream, choices: Sequence[Choice], attach: Attach) -> None:
        """From now on, the rows of these sequences are the stream's."""
        sequences = self._terms.setdefault(attach.term, {})
        for sequence, choice in enumerate(choices, attach.first_sequence):
            sequences[sequence] = stream, choice

    def unbind(self, stream: Stream, attach: Attach) -> None:
        """The rows of that attachment are nobody's any more."""
        sequences = self._terms.get(attach.term, {})
        for sequence in range(attach.first_sequence, attach.first_sequence + len(stream.completions)):
            sequences.pop(sequence, None)
        if not sequences:
            self._terms.pop(attach.term, None)

    def apply(self, output: StepOutput) -> Progress:
        """Hands the tokens of a step to their choices."""
        progress = Progress()
        sequences = self._terms.get(output.term)
        if sequences is None:
            return progress
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
                stream.cached_tokens += choice.begin(start)
                continue
            try:
                fresh = choice.accept(start + count - choice.prompt_length, token, finish)
            except TokenGap:
                progress.gapped.add(stream)
                continue
            if not fresh:
                continue
            progress.tokens += 1
            progress.touched.add(stream)
            if len(choice.tokens) == 1:
                stream.cached_tokens += choice.begin(start)
            if choice.finish is not None:
                progress.ended.add(stream)
                if finish == Finish.NONE:
                    progress.stopped.setdefault(stream, []).append(sequence)
        return progress
