"""The events of a completion that begins with its prompt."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pagewire.services.gateway.answers.logprobs import echoed_logprobs
from pagewire.services.gateway.answers.openai_shapes import CompletionChoice
from pagewire.services.gateway.answers.sse_events import CompletionEvents
from pagewire.shared.messages.client import Delta, Final, FinalChoice, PromptLogprobs


class Echo(NamedTuple):
    """The prompts with which choices begin."""

    texts: Sequence[str]
    firsts: Sequence[str] | None = None
    """Text of the first token of each, if log-probabilities are echoed too: these come with the first deltas."""


class EchoEvents(CompletionEvents):
    """Shows each prompt before the first text of its choices."""

    def __init__(self, request_id: str, model: str, echo: Echo, *, no_tokens: bool, **shown: Any) -> None:
        """`no_tokens`: whether the generated tokens are dropped; `shown`: see `Events`."""
        super().__init__(request_id, model, **shown)
        self._echo = echo
        self._no_tokens = no_tokens
        self._waiting = set(range(len(echo.texts))) if echo.firsts is not None else set()
        """Prompts whose log-probabilities have not come yet: their choices have not begun."""
        self._held: defaultdict[int, list[Delta]] = defaultdict(list)
        """Deltas of their choices."""

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns one event per choice with the prompt that it echoes, unless that comes with log-probabilities."""
        super().beginning(choices)
        if self._echo.firsts is not None:
            return b""
        usage = self._usage(prompt_tokens) if self._counted else None
        texts = [text for text in self._echo.texts for _ in range(choices)]
        return b"".join(self._data([self.text(index, text)], usage) for index, text in enumerate(texts))

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas; those of choices that cannot begin yet are kept for later."""
        events = []
        for delta in batch:
            prompt, told = delta.index // self._choices, delta.prompt_logprobs
            ready = [delta]
            if prompt in self._waiting:
                self._held[prompt].append(delta)
                if told is msgspec.UNSET:
                    continue
                self._waiting.discard(prompt)
                events.append(self._echoed(prompt, told, prompt_tokens))
                ready, delta.prompt_logprobs = self._held.pop(prompt), msgspec.UNSET
            events.append(super().texts([] if self._no_tokens else ready, prompt_tokens))
        return b"".join(events)

    def _echoed(self, prompt: int, told: PromptLogprobs, prompt_tokens: int | None) -> bytes:
        """Returns one event per choice of a prompt, with the prompt and its log-probabilities."""
        assert self._echo.firsts is not None
        text, usage = self._echo.texts[prompt], self._usage(prompt_tokens) if self._counted else None
        events = []
        for index in range(prompt * self._choices, (prompt + 1) * self._choices):
            self._offsets[index] = len(text)
            logprobs = echoed_logprobs(self._echo.firsts[prompt], told)
            events.append(self._data([CompletionChoice(index, text, logprobs, prompt_logprobs=told)], usage))
        return b"".join(events)

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns one event per choice with its finish reason, and with `usage` one event with the usage."""
        if self._no_tokens:
            final = msgspec.structs.replace(
                final,
                choices=[FinalChoice(choice.index, "length") for choice in final.choices],
                usage=msgspec.structs.replace(final.usage, completion_tokens=0),
            )
        return super().ends(final, usage=usage)
