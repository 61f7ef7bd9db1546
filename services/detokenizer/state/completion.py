"""One completion: its tokens, its text, and how it ended."""

from dataclasses import dataclass, field
from typing import Literal

from pagewire.services.detokenizer.text.stop_strings import StopStrings
from pagewire.services.detokenizer.text.text_decoder import TextDecoder
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages import unpack
from pagewire.shared.messages.client import TokenOrigin
from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.open import OpenStream
from pagewire.shared.messages.step import ERRORS, Finish

FinishName = Literal["stop", "length", "cancelled"]


class TokenGap(PagewireError):
    """A token has arrived, and the token before it or its log-probabilities have not."""


@dataclass(slots=True, eq=False)
class Completion:
    """One completion as clients get it.

    Every frame is a function of these fields, so that a frame that is sent again has the same bytes.
    """

    tokens: list[int] = field(default_factory=list)
    """Generated ids, up to and including the one that ended the completion."""
    texts: list[str] = field(default_factory=list)
    """Text of each token's frame. Joined, the text of the completion."""
    finish: FinishName | None = None
    """Why the completion ended; None while it goes on."""
    stop_reason: str | int | None = None
    """Stop string, or id of a stop token that the client named, that ended the completion."""
    logprobs: list[ReportedLogprobs] | None = None
    """Log-probabilities of each token; None if the request does not ask for them."""
    score: float | None = None
    """Cumulative log-probability of a completion that a beam search has found."""
    origins: dict[int, TokenOrigin] | None = None
    """Origins of the tokens that were not sampled, by position; None: the request does not ask for them, or a token
    came without its step."""


class StreamedChoice(Completion):
    """A completion that is being generated.

    The text of a token depends only on the tokens up to it and on whether it is the last one. The text is empty while a
    character or a stop string is incomplete; the last token's text includes what was held back.

    Attributes:
        prompt_length: position of the first generated token in its sequence.
        prompt_logprobs: log-probabilities of each token of the prompt, None for a token without a report so far; empty
            if the request does not ask for them, or this is not the first completion of its prompt.
        token_at: time at which the step with its last token was read, in monotonic seconds; 0: none was read here.
    """

    __slots__ = (
        "_counts_cached",
        "_decoder",
        "_reported",
        "_reports",
        "_request",
        "_stops",
        "prompt_length",
        "prompt_logprobs",
        "token_at",
    )

    def __init__(self, request: OpenStream, decoder: TextDecoder, prompt_length: int, *, first: bool) -> None:
        """`first`: whether it is the first completion of its prompt."""
        super().__init__(logprobs=[] if request.logprobs else None)
        reported_tokens = prompt_length if first and request.prompt_logprobs else 0
        self.prompt_logprobs: list[ReportedLogprobs | None] = [None] * reported_tokens
        self._reported: dict[int, ReportedLogprobs] = {}
        self._reports = request.logprobs or request.prompt_logprobs
        self.prompt_length = prompt_length
        self.token_at = 0.0
        self._counts_cached = first
        self._request = request
        self._decoder = decoder
        self.origins = {} if request.return_token_origins else None
        self._stops = StopStrings(request.stop, include=request.include_stop) if request.stop else None

    def accept(self, position: int, token: int, finish: int) -> bool:
        """Appends the token at `position`, counted from the first generated one.

        Returns False if the token is here already, or the completion has ended. `finish` is the device's `Finish`; an
        error ends nothing, since it belongs to the token behind this one.

        Raises:
            TokenGap: tokens before it, or log-probabilities, are missing.
        """
        length = len(self.tokens)
        if position < length or self.finish is not None:
            return False
        if position > length:
            raise TokenGap(f"token {position} came where token {length} is the next")
        if self._reports:
            self._take_reported(position)
        self.tokens.append(token)
        if finish and finish in ERRORS:
            finish = Finish.NONE
        text = self._decode_last(token, finish) if finish else self._decoder.push(token)
        if self._stops is not None:
            text = self._stop(self._stops, text, finish)
        self.texts.append(text)
        if finish and self.finish is None:
            self.finish = "length" if finish == Finish.LENGTH else "stop"
            if finish == Finish.STOP and token in self._request.stop_token_ids:
                self.stop_reason = token
        return True

    def _take_reported(self, position: int) -> None:
        """Moves the reported log-probabilities of the token at `position` to their place."""
        if not position and None in self.prompt_logprobs[1:]:
            raise TokenGap("the first token came before the log-probabilities of its prompt")
        if self.logprobs is not None:
            reported = self._reported.pop(position, None)
            if reported is None:
                raise TokenGap(f"token {position} came without its log-probabilities")
            self.logprobs.append(reported)

    def report(self, position: int, logprobs: ReportedLogprobs) -> None:
        """Keeps the log-probabilities of the token at `position` of the sequence until the token is accepted."""
        if position >= self.prompt_length:
            if self.logprobs is not None and position - self.prompt_length >= len(self.tokens):
                self._reported[position - self.prompt_length] = logprobs
        elif self.prompt_logprobs:
            self.prompt_logprobs[position] = logprobs

    def note_origins(self, position: int, tokens: int, drafted: int) -> None:
        """Notes how the tokens of a row from `position` on came: drafted ones, a sampled one, and then forced ones."""
        if self.origins is not None:
            for place in range(tokens):
                if place != drafted:
                    self.origins[position + place] = "drafted" if place < drafted else "forced"

    def count_cached(self, start: int) -> int:
        """Returns how many prompt tokens were cached, where the executor computes the sequence from `start` on.

        Each prompt counts once: later calls, and calls for other completions of the prompt, return 0.
        """
        cached = min(start, self.prompt_length) if self._counts_cached else 0
        self._counts_cached = False
        return cached

    def cancel(self) -> None:
        """Ends the completion where it is, unless it has ended. Text that is held back is not sent."""
        self.finish = self.finish or "cancelled"

    def _decode_last(self, token: int, finish: int) -> str:
        if finish == Finish.STOP and not self._request.include_stop:
            return self._decoder.flush()
        return self._decoder.push(token) + self._decoder.flush()

    def _stop(self, stops: StopStrings, text: str, finish: int) -> str:
        """Returns the part of `text`, and of the text held back before it, that may be sent now."""
        text, stop = stops.push(text, armed=len(self.tokens) > self._request.min_tokens)
        if stop is not None:
            self.finish, self.stop_reason = "stop", stop
        elif finish:
            text += stops.flush()
        return text


def open_choices(vocabulary: Vocabulary, request: OpenStream) -> list[StreamedChoice]:
    """Returns the completions of a request: choice p * n + c is completion c of prompt p."""
    prompts = zip(request.prompts, unpack(request.prompt_lengths), strict=True)
    return [
        StreamedChoice(
            request, TextDecoder(vocabulary, unpack(tail), skip_special=request.skip_special), length, first=c == 0
        )
        for tail, length in prompts
        for c in range(request.n)
    ]
