"""Offline generation: turns a list of prompts into a list of results with a stack of its own."""

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, Self

from pagewire.client.async_client import AsyncClient, Prompt
from pagewire.client.sync import LoopThread
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import config
from pagewire.shared.errors import InvalidRequest, Overloaded, PagewireError
from pagewire.shared.messages.client import Result, SamplingParams

REQUEST_TIMEOUT = 24 * 3600.0
"""Seconds until a request's deadline: offline, a request may wait long for its turn."""


class LLM:
    """`LLM("folder-or-id").generate(["Hello"], SamplingParams(max_tokens=16))`.

    The constructor starts a stack on free ports; the stack ends with `close`, with the `with` block, or with the
    program.

    Args:
        model: folder, .gguf file, hub id or short name; empty: the default model, or the bundled one where that cannot
            be had.
        settings: any setting by its name with underscores, such as `max_num_seqs=8`.

    Raises:
        ConfigurationError: the model or a setting is invalid.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        flags = {name.replace("_", "-"): value for name, value in settings.items()}
        self._settings = config.load({"model": model, "nats-port": 0, "log-level": "warning"} | flags)
        self._thread = LoopThread()
        self._stack = Stack(self._settings, PIPELINE)
        self._finalizer = weakref.finalize(self, _end, self._thread, self._stack)
        try:
            self._thread.run(self._stack.__aenter__())
            self._address = self._thread.run(self._stack.ready())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stack. May be called twice."""
        self._finalizer()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Returns one result per prompt, in order; `result.choices[0].text` is the text.

        Args:
            prompts: a text, or a list of texts or of token ids.
            sampling: sampling parameters for all prompts, or a list with those of each.

        Raises:
            RequestError: a prompt is refused, or the pipeline has failed.
        """
        several: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = sampling if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise InvalidRequest(f"give as many sampling parameters ({len(each)}) as prompts ({len(several)})")
        return self._thread.run(self._generate(list(zip(several, each, strict=True))))

    async def _generate(self, work: Sequence[tuple[Prompt, SamplingParams]]) -> list[Result]:
        """Keeps twice as many requests in flight as there are slots, so that one is waiting when a slot is freed."""
        in_flight = asyncio.Semaphore(2 * self._settings.max_num_seqs)
        async with AsyncClient(self._address.nats, api_key=self._settings.api_key) as client:

            async def one(prompt: Prompt, sampling: SamplingParams) -> Result:
                async with in_flight:
                    while True:
                        try:
                            return await client.generate(prompt, sampling, timeout=REQUEST_TIMEOUT)
                        except Overloaded as error:
                            await asyncio.sleep((error.retry_after_ms or 100) / 1000)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(prompt, sampling)) for prompt, sampling in work]
            except* PagewireError as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def _end(thread: LoopThread, stack: Stack) -> None:
    thread.run(stack.__aexit__())
    thread.close()
