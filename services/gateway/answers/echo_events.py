"""The events of a completion that begins with its prompt."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from typing_extensions import override

from pagewire.services.gateway.answers.logprobs import echoed_logprobs
from pagewire.services.gateway.answers.openai_events import CompletionEvents, EventFields
from pagewire.services.gateway.answers.openai_shapes import CompletionChoice
from pagewire.shared.messages.client import Delta, Final, FinalChoice, PromptLogprobs


class Echo(NamedTuple):
    """The prompts with which choices begin."""

    texts: Sequence[str]
    """Text of each prompt."""
    firsts: Sequence[str] | None = None
    """Text of each prompt's first token, if the log-probabilities are echoed too, which come with the first deltas."""


class EchoEvents(CompletionEvents):
    """Shows each prompt before the first text of its choices."""

    def __init__(self, request_id: str, model: str, fields: EventFields, echo: Echo, *, drops_token: bool) -> None:
        """`drops_token`: whether the generated tokens are dropped."""
        super().__init__(request_id, model, fields)
        self._echo = echo
        self._drops_token = drops_token
        self._logprobs = fields.logprobs
        self._waiting = set(range(len(echo.texts))) if echo.firsts is not None else set()
        """Prompts whose log-probabilities have not come yet: their choices have not begun."""
        self._held: defaultdict[int, list[Delta]] = defaultdict(list)
        """Deltas of the choices that have not begun, by prompt."""

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        """Returns one event per choice with the prompt that it echoes, unless that comes with log-probabilities."""
        super().beginning(choices)
        if self._echo.firsts is not None:
            return b""
        usage = self._usage(prompt_tokens)
        texts = [text for text in self._echo.texts for _ in range(choices)]
        return b"".join(self._event([self._begun(index, text)], usage) for index, text in enumerate(texts))

    @override
    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas; those of choices that cannot begin yet are kept for later."""
        events = []
        for delta in batch:
            prompt, logprobs = delta.index // self._choices, delta.prompt_logprobs
            ready = [delta]
            if prompt in self._waiting:
                self._held[prompt].append(delta)
                if logprobs is msgspec.UNSET:
                    continue
                self._waiting.discard(prompt)
                events.append(self._echoed(prompt, logprobs, prompt_tokens))
                ready, delta.prompt_logprobs = self._held.pop(prompt), msgspec.UNSET
            events.append(super().texts([] if self._drops_token else ready, prompt_tokens))
        return b"".join(events)

    @override
    def ends(self, final: Final, *, usage: bool) -> bytes:
        if self._drops_token:
            final = msgspec.structs.replace(
                final,
                choices=[FinalChoice(choice.index, "length") for choice in final.choices],
                usage=msgspec.structs.replace(final.usage, completion_tokens=0),
            )
        return super().ends(final, usage=usage)

    def _echoed(self, prompt: int, logprobs: PromptLogprobs, prompt_tokens: int | None) -> bytes:
        """Returns one event per choice of a prompt, with the prompt and its log-probabilities."""
        assert self._echo.firsts is not None
        text, usage = self._echo.texts[prompt], self._usage(prompt_tokens)
        columns = echoed_logprobs(self._echo.firsts[prompt], logprobs) if self._logprobs else None
        events = []
        for index in range(prompt * self._choices, (prompt + 1) * self._choices):
            self._offsets[index] = len(text)
            choice = self._begun(index, text)
            choice.logprobs, choice.prompt_logprobs = columns, logprobs
            events.append(self._event([choice], usage))
        return b"".join(events)

    def _begun(self, index: int, text: str) -> CompletionChoice:
        """Returns a choice that begins with its prompt, and with the ids that no delta shows."""
        choice = self.text(index, text)
        if self._drops_token and self._prompt_ids is not None:
            choice.prompt_token_ids = self._prompt_ids[index // self._choices]
        return choice
