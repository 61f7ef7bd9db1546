"""One completion in the making: tokens in, by position, each with its text."""

from pagewire.services.detokenizer.completion import Completion
from pagewire.services.detokenizer.stops import StopStrings
from pagewire.services.detokenizer.text import TextDecoder
from pagewire.services.detokenizer.vocabulary import Vocabulary
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages import unpack
from pagewire.shared.messages.open import OpenStream
from pagewire.shared.messages.step import Finish


class TokenGap(PagewireError):
    """A token came before the one at the position ahead of it."""


class Choice(Completion):
    """A completion that grows.

    A token's text depends on the tokens up to it and on whether it is the last one, on nothing else. It may be empty
    while a character or a stop string is open; the last token's text carries what was held back.

    Attributes:
        prompt_length: position of the first generated token in its sequence.
    """

    __slots__ = ("_decoder", "_leads", "_request", "_stops", "prompt_length")

    def __init__(self, request: OpenStream, decoder: TextDecoder, prompt_length: int, *, leads: bool) -> None:
        """`leads`: it is the first completion of its prompt."""
        super().__init__()
        self.prompt_length = prompt_length
        self._leads = leads
        self._request = request
        self._decoder = decoder
        self._stops = StopStrings(request.stop, include=request.include_stop) if request.stop else None

    def accept(self, position: int, token: int, finish: int) -> bool:
        """Takes in the token at `position`, counted from the first generated one; False if it is known already.

        `finish` is the device's `Finish`. Tokens behind the end of the completion are dropped.

        Raises:
            TokenGap: tokens before it are missing.
        """
        known = len(self.tokens)
        if position < known or self.finish is not None:
            return False
        if position > known:
            raise TokenGap(f"token {position} came where token {known} is the next")
        self.tokens.append(token)
        text = self._decode_last(token, finish) if finish else self._decoder.push(token)
        if self._stops is not None:
            text = self._stop(self._stops, text, finish)
        self.texts.append(text)
        if finish and self.finish is None:
            self.finish = "length" if finish == Finish.LENGTH else "stop"
            if finish == Finish.STOP and token in self._request.stop_token_ids:
                self.stop_reason = token
        return True

    def begin(self, start: int) -> int:
        """The executor computes the sequence from position `start` on. The tokens of the prompt before it were cached:
        as many the first time, for one completion of each prompt; 0 ever after."""
        cached = min(start, self.prompt_length) if self._leads else 0
        self._leads = False
        return cached

    def cancel(self) -> None:
        """Ends the completion where it stands, if it has not ended: its text is what its frames said."""
        self.finish = self.finish or "cancelled"

    def _decode_last(self, token: int, finish: int) -> str:
        if finish == Finish.STOP and not self._request.include_stop:
            return self._decoder.flush()
        return self._decoder.push(token) + self._decoder.flush()

    def _stop(self, stops: StopStrings, text: str, finish: int) -> str:
        """What of `text`, and of what was held back before it, may be seen now."""
        text, stop = stops.push(text, armed=len(self.tokens) > self._request.min_tokens)
        if stop is not None:
            self.finish, self.stop_reason = "stop", stop
        elif finish:
            text += stops.flush()
        return text


def open_choices(vocabulary: Vocabulary, request: OpenStream) -> list[Choice]:
    """The completions of a request: choice p * n + c is completion c of prompt p."""
    return [
        Choice(request, TextDecoder(vocabulary, unpack(tail), skip_special=request.skip_special), length, leads=c == 0)
        for tail, length in zip(request.prompts, unpack(request.prompt_lengths), strict=True)
        for c in range(request.n)
    ]
