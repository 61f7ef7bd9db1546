"""Generation in a program with an event loop, by a stack of its own."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.llm import REQUEST_TIMEOUT, OnePrompt, request_of, settings_of
from pagewire.outputs import RequestOutput
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages.client import Choice, Delta, Usage
from pagewire.shared.messages.client import SamplingParams as Sampling

_UNFINISHED: Any = None
"""Finish reason of a completion that has not ended, as in vLLM."""


class AsyncLLM:
    """`async with AsyncLLM("folder-or-id") as llm: async for output in llm.generate("Hello", params, "id"): ...`

    The stack starts with the block and ends with it. The arguments are those of `LLM`.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._settings = settings_of(model, settings)
        self._opened = AsyncExitStack()
        self._client: AsyncClient | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            stack = await opened.enter_async_context(Stack(self._settings, PIPELINE))
            address = await stack.ready()
            client = AsyncClient(address.nats, api_key=self._settings.api_key)
            self._client = await opened.enter_async_context(client)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client = None
        await self._opened.aclose()

    async def generate(
        self, prompt: OnePrompt, sampling_params: Sampling | None = None, request_id: str = "", *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the result of a prompt as it grows; the last one is `finished`. Leaving the loop early cancels it.

        Args:
            prompt: text, token ids, or one of vLLM's dictionaries.
            sampling_params: sampling parameters; None: the model's generation_config.
            request_id: [A-Za-z0-9_-]{1,64}; by default random.
            priority: requests with lower values run earlier.

        Raises:
            RequestError: the prompt is refused, or the pipeline has failed.
        """
        if self._client is None:
            raise BusUnavailable("the stack is not running: use it as `async with AsyncLLM(...) as llm:`")
        request = request_of(prompt, priority=priority)
        stream = self._client.stream(
            sampling=sampling_params, request_id=request_id, timeout=REQUEST_TIMEOUT, **request
        )
        text = request["prompt"] if isinstance(request["prompt"], str) else None
        result = _GrowingResult(stream, text, 1 if sampling_params is None else sampling_params.n)
        async for batch in stream.batches():
            yield result.add(batch)
        yield result.end()

    async def abort(self, request_id: str) -> None:
        """Cancels a request. Its last result has the tokens that were generated so far."""
        if self._client is not None:
            await self._client.cancel(request_id)


class _GrowingResult:
    """The result of a stream so far."""

    def __init__(self, stream: Stream, prompt: str | None, choices: int) -> None:
        self._stream = stream
        self._prompt = prompt
        self._outputs = [Choice(index, "", [], _UNFINISHED) for index in range(choices)]
        self._so_far = RequestOutput(
            request_id=stream.request_id,
            prompt=prompt,
            prompt_token_ids=[],
            prompt_logprobs=None,
            outputs=self._outputs,
            usage=Usage(0, 0),
            finished=False,
        )

    def add(self, batch: list[Delta]) -> RequestOutput:
        """Returns the result with some more tokens."""
        self._so_far.prompt_token_ids = (self._stream.prompt_token_ids or [[]])[0]
        self._so_far.usage = Usage(self._stream.prompt_tokens or 0, self._so_far.usage.completion_tokens)
        for delta in batch:
            choice = self._outputs[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            self._so_far.usage.completion_tokens += len(delta.token_ids)
            if delta.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + delta.logprobs
            if delta.prompt_logprobs is not msgspec.UNSET:
                self._so_far.prompt_logprobs = delta.prompt_logprobs
        return msgspec.structs.replace(self._so_far, outputs=[msgspec.structs.replace(each) for each in self._outputs])

    def end(self) -> RequestOutput:
        """Returns the whole result."""
        final = self._stream.final
        assert final is not None
        for choice, ended in zip(self._outputs, final.choices, strict=True):
            choice.finish_reason, choice.stop_reason = ended.finish_reason, ended.stop_reason
        return msgspec.structs.replace(self._so_far, usage=final.usage, metrics=final.metrics, finished=True)
