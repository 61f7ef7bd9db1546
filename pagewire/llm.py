"""Offline generation: turns a list of prompts into a list of results with a stack of its own."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from pagewire.client.async_client import AsyncClient, Messages
from pagewire.client.sync import LoopThread
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import config
from pagewire.shared.errors import InvalidRequest, Overloaded, PagewireError
from pagewire.shared.messages.client import ChatFormat, Choice, PromptLogprobs, Result, SamplingParams, Usage

REQUEST_TIMEOUT = 24 * 3600.0
"""Seconds until a request's deadline: offline, a request may wait long for its turn."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The result of one prompt, with the attribute names of vLLM's class of the same name."""

    request_id: str
    prompt: str | None
    """Text of the prompt, if it was given as one."""
    prompt_token_ids: list[int] | None
    """Ids of the prompt, if they were given or `prompt_logprobs` was asked for."""
    prompt_logprobs: PromptLogprobs | None
    """Of each token of the prompt; the first one has None."""
    outputs: list[Choice]
    usage: Usage
    finished: bool = True
    chat_format: ChatFormat | None = None
    """With which `pagewire.read_message` finds tool calls and reasoning in the texts; None: there are none."""


def output_of(request: Mapping[str, Any], result: Result) -> RequestOutput:
    """Returns the result of a request with one prompt."""
    prompt = request.get("prompt")
    ids = list(prompt) if prompt is not None and not isinstance(prompt, str) else None
    return RequestOutput(
        request_id=result.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids if result.prompt_token_ids is None else result.prompt_token_ids[0],
        prompt_logprobs=None if result.prompt_logprobs is None else result.prompt_logprobs[0],
        outputs=result.choices,
        usage=result.usage,
        chat_format=result.chat_format,
    )


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
        chosen = config.load({"model": model, "nats-port": 0, "log-level": "warning"} | flags)
        # Nobody else uses this stack, and offline every request waits.
        self._settings = msgspec.structs.replace(chosen, api_key_file="", max_queue_wait=None)
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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Returns one result per prompt, in order; `result.outputs[0].text` is the text.

        Args:
            prompts: a text, or a list of texts or of token ids.
            sampling_params: for all prompts, or a list with those of each; None: the model's generation_config.

        Raises:
            RequestError: a prompt is refused, or the pipeline has failed.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        return self._run([{"prompt": prompt} for prompt in several], sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns the model's answer to a conversation, or to each of several, in order.

        Args:
            messages: the turns of a conversation, or several such lists.
            sampling_params: for all conversations, or a list with those of each; None: the model's generation_config.
            options: `tools`, `tool_choice`, `parallel_tool_calls`, `add_generation_prompt`, `continue_final_message`
                and `chat_template_kwargs`, as `AsyncClient.stream` has them.

        Raises:
            RequestError: a conversation is refused, or the pipeline has failed.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run([{"messages": conversation, **options} for conversation in several], sampling_params)

    def _run(
        self, requests: Sequence[dict[str, Any]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(requests)
        if len(each) != len(requests):
            raise InvalidRequest(f"there are {len(requests)} prompts and {len(each)} sampling parameters")
        return self._thread.run(self._generate(list(zip(requests, each, strict=True))))

    async def _generate(self, work: Sequence[tuple[dict[str, Any], SamplingParams | None]]) -> list[RequestOutput]:
        """Keeps twice as many requests in flight as there are slots, so that a free slot finds the next one waiting.

        A request for which the services have no room, because there are so many slots, is sent again later.
        """
        room = asyncio.Semaphore(2 * self._settings.max_num_seqs * self._settings.data_parallel_size)
        async with AsyncClient(self._address.nats, api_key=self._settings.api_key) as client:

            async def one(request: dict[str, Any], sampling: SamplingParams | None) -> Result:
                async with room:
                    while True:
                        try:
                            return await client.generate(sampling=sampling, timeout=REQUEST_TIMEOUT, **request)
                        except Overloaded as error:
                            await asyncio.sleep((error.retry_after_ms or 100) / 1000)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request, sampling)) for request, sampling in work]
            except* PagewireError as errors:
                raise errors.exceptions[0] from None
        return [output_of(request, task.result()) for (request, _), task in zip(work, tasks, strict=True)]


def _end(thread: LoopThread, stack: Stack) -> None:
    thread.run(stack.__aexit__())
    thread.close()
