"""Offline generation: turns a list of prompts into a list of results with a stack of its own."""

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from pagewire.client.async_client import AsyncClient, Messages
from pagewire.client.sync import LoopThread
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.lora_request import LoRARequest
from pagewire.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, output_of
from pagewire.sampling_params import BeamSearchParams
from pagewire.services.executor.devices.defaults import offline
from pagewire.services.tokenizer.validation.generation_config import generation_defaults
from pagewire.shared.errors import InvalidRequest, Overloaded, PagewireError
from pagewire.shared.messages.client import Choice, Result, SamplingParams
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.process import device_choice
from pagewire.shared.settings import config
from pagewire.shared.settings.config import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REQUEST_TIMEOUT = 24 * 3600.0
"""Seconds until a request's deadline: offline, a request may wait long for its turn."""


IGNORED = frozenset({"disable_custom_all_reduce", "disable_log_stats", "enforce_eager", "swap_space", "tokenizer_mode"})
"""Arguments of vLLM's `LLM` that are accepted without effect."""
RENAMED = {"enable_prefix_caching": "prefix_cache", "enable_chunked_prefill": ""}
"""Settings by the arguments of vLLM's `LLM` with another name; empty: the argument has no effect."""
PROMPT_OPTIONS = frozenset({"truncate_prompt_tokens", "add_special_tokens"})
"""Keys that `tokenization_kwargs` may have."""

OnePrompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary as in vLLM: `{"prompt": text}` or `{"prompt_token_ids": ids}`, and `cache_salt`."""


def settings_of(model: str, arguments: Mapping[str, Any]) -> Settings:
    """Returns the settings of a private stack from the arguments of `LLM`.

    Raises:
        ConfigurationError: the model or a setting is invalid.
    """
    names = {name: RENAMED.get(name, name) for name in arguments if name not in IGNORED}
    if not arguments.get("trust_remote_code"):
        names.pop("trust_remote_code", None)
    flags = {kept.replace("_", "-"): arguments[name] for name, kept in names.items() if kept}
    settings = device_choice.resolve(config.load({"model": model, "nats-port": 0, "log-level": "warning"} | flags))
    # Offline, every request waits, and the program itself names the adapters.
    lora_dirs = settings.lora_dirs or ("/" if settings.enable_lora else "")
    return msgspec.structs.replace(settings, api_key_file="", max_queue_wait=None, lora_dirs=lora_dirs)


def request_of(prompt: OnePrompt, **options: Any) -> dict[str, Any]:
    """Returns the arguments of `AsyncClient.stream` for a prompt.

    Raises:
        InvalidRequest: a dictionary has neither text nor token ids, or something that is not supported.
    """
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt, "return_token_ids": True, **options}
    fields = dict(prompt)
    text, ids = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
    salt = fields.pop("cache_salt", "")
    if unknown := [name for name, value in fields.items() if value is not None]:
        raise InvalidRequest(f"a prompt with {', '.join(unknown)} is not supported")
    if ids is None and text is None:
        raise InvalidRequest("a prompt needs prompt or prompt_token_ids")
    return request_of(ids if ids is not None else text, cache_salt=salt or "", **options)


class LLM:
    """`LLM("folder-or-id").generate(["Hello"], SamplingParams(max_tokens=16))`.

    The constructor starts a stack on free ports; the stack ends with `close`, with the `with` block, or with the
    program. Where a broker is named, by `nats_url` or in the environment, the stack uses that one.

    Args:
        model: folder, .gguf file, hub id or short name; empty: the default model, or the bundled one where that cannot
            be had.
        settings: any setting by its name with underscores, such as `max_num_seqs=8`. Arguments of vLLM's class
            without a counterpart are ignored.

    Raises:
        ConfigurationError: the model or a setting is invalid.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._settings = offline(settings_of(model, settings))
        self._loaded: dict[str, LoRARequest] = {}
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
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: object = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns one result per prompt, in order; `result.outputs[0].text` is the text.

        Args:
            prompts: a prompt, or a list of prompts.
            sampling_params: parameters of all prompts, or a list with one per prompt; None: the model's
                generation_config.
            use_tqdm: without effect: no progress is shown.
            lora_request: adapter of all prompts, or a list with one or None per prompt; `LLM` needs `enable_lora`.
            priority: priority of each prompt; lower ones run earlier.
            tokenization_kwargs: `truncate_prompt_tokens` and `add_special_tokens`.

        Raises:
            RequestError: a prompt is refused, or the pipeline has failed.
        """
        del use_tqdm
        options = dict(tokenization_kwargs or {})
        _refuse(**{name: value for name, value in options.items() if name not in PROMPT_OPTIONS})
        several = _several(prompts)
        priorities = [0] * len(several) if priority is None else priority
        requests = [request_of(one, priority=each, **options) for one, each in zip(several, priorities, strict=True)]
        return self._run(self._adapted(requests, lora_request), sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: object = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: None = None,
        chat_template_content_format: str = "auto",
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns the model's answer to a conversation, or to each of several, in order.

        Args:
            messages: the turns of a conversation, or a list of conversations.
            sampling_params: parameters of all conversations, or a list with one per conversation; None: the model's
                generation_config.
            use_tqdm: without effect: no progress is shown.
            lora_request: adapter of all prompts, or a list with one or None per prompt; `LLM` needs `enable_lora`.
            chat_template: not supported: it is an argument of `LLM`.
            chat_template_content_format: without effect: it is read off the template.
            options: `tools`, `tool_choice`, `parallel_tool_calls`, `add_generation_prompt`, `continue_final_message`,
                `chat_template_kwargs` and other arguments of `AsyncClient.stream`.

        Raises:
            RequestError: a conversation is refused, or the pipeline has failed.
        """
        del use_tqdm, chat_template_content_format
        _refuse(chat_template=chat_template)
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        requests = [{"messages": one, "return_token_ids": True, **options} for one in several]
        return self._run(self._adapted(requests, lora_request), sampling_params)

    def beam_search(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: object = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Returns the beams of each prompt, best first.

        Args:
            prompts: a prompt, or a list of prompts.
            params: parameters of all searches.
            lora_request: adapter of all prompts, or a list with one or None per prompt; `LLM` needs `enable_lora`.
            use_tqdm: without effect: no progress is shown.
            concurrency_limit: without effect: as many searches run at once as there is room for.

        Raises:
            RequestError: a prompt is refused, or the pipeline has failed.
        """
        del use_tqdm, concurrency_limit
        if params.temperature:
            raise InvalidRequest("temperature must be 0 in a beam search, which does not sample")
        width, max_logprobs = params.beam_width, self._settings.max_logprobs
        sampling = SamplingParams(
            n=width,
            beam_width=width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            logprobs=2 * width if max_logprobs < 0 else min(2 * width, max_logprobs),
            skip_special_tokens=False,
        )
        requests = self._adapted([request_of(prompt) for prompt in _several(prompts)], lora_request)
        results = self._run(requests, sampling)
        return self._thread.run(self._beams(results))

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Returns the model's tokenizer, as an object of `transformers`."""
        return load_tokenizer(model_folder.tokenizer_folder(self._stack.settings)).to_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default parameters of a request: those of the model's generation_config."""
        path = model_folder.folder_of(self._stack.settings)
        if self._settings.generation_config != "auto":
            return SamplingParams()
        vocab_size = model_folder.read_config(path).get("vocab_size", 0)
        defaults = generation_defaults(model_folder.read_generation_config(path), vocab_size)
        limit = {} if defaults.max_new_tokens is None else {"max_tokens": defaults.max_new_tokens}
        return SamplingParams(**defaults.fields | limit)

    def _adapted(
        self, requests: Sequence[dict[str, Any]], adapters: LoRARequest | Sequence[LoRARequest | None] | None
    ) -> Sequence[dict[str, Any]]:
        """Returns requests that name their adapters, after these have been loaded."""
        if adapters is None:
            return requests
        each = [adapters] * len(requests) if isinstance(adapters, LoRARequest) else adapters
        if len(each) != len(requests):
            raise InvalidRequest(f"there are {len(requests)} prompts and {len(each)} adapters")
        if not self._settings.enable_lora:
            raise InvalidRequest("lora_request needs LLM(..., enable_lora=True)")
        if not self._stack.brokers:
            raise InvalidRequest("lora_request needs a broker of the LLM's own: leave nats_url out")
        absolute = [msgspec.structs.replace(one, lora_path=os.path.abspath(one.lora_path)) for one in each if one]
        self._thread.run(self._load({one.lora_name: one for one in absolute}))
        named = [{} if one is None else {"model": one.lora_name} for one in each]
        return [request | name for request, name in zip(requests, named, strict=True)]

    async def _load(self, adapters: Mapping[str, LoRARequest]) -> None:
        """Loads the adapters, by name, that are not loaded."""
        missing = [one for one in adapters.values() if one.load_inplace or self._loaded.get(one.lora_name) != one]
        if not missing:
            return
        async with AsyncClient(self._address.nats, user=self._stack.operator) as client:
            for one in missing:
                await client.load_adapter(one.lora_name, one.lora_path, replace=True)
                self._loaded[one.lora_name] = one

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
        slots = self._settings.max_num_seqs or 1
        room = asyncio.Semaphore(2 * slots * self._settings.data_parallel_size)
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
            return [
                await _output(client, request, task.result()) for (request, _), task in zip(work, tasks, strict=True)
            ]

    async def _beams(self, results: Sequence[RequestOutput]) -> list[BeamSearchOutput]:
        """Returns the beams of each prompt, given the results of their searches."""
        async with AsyncClient(self._address.nats, api_key=self._settings.api_key) as client:
            return [
                BeamSearchOutput([await _beam(client, result.prompt_token_ids, beam) for beam in result.outputs])
                for result in results
            ]


async def _beam(client: AsyncClient, prompt: list[int], beam: Choice) -> BeamSearchSequence:
    """Returns one beam of a prompt."""
    tokens = prompt + beam.token_ids
    return BeamSearchSequence(
        tokens=tokens,
        text=await client.detokenize(tokens, keep_prefix=True),
        cum_logprob=beam.cumulative_logprob or 0.0,
        logprobs=beam.logprobs or [],
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
    )


def _several(prompts: OnePrompt | Sequence[OnePrompt]) -> Sequence[OnePrompt]:
    """Returns the prompts as a list. A single prompt may be a text, a dictionary, or a list of ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(each, int) for each in prompts):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[OnePrompt]", prompts)


def _refuse(**arguments: object) -> None:
    """Raises InvalidRequest if an unsupported argument is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidRequest(f"{name} is not supported: leave it out")


async def _output(client: AsyncClient, request: Mapping[str, Any], result: Result) -> RequestOutput:
    """Returns the result of a request with one prompt, with the prompt's text."""
    if "messages" not in request or not result.prompt_token_ids:
        return output_of(request, result)
    return output_of(request, result, await client.detokenize(result.prompt_token_ids[0], keep_prefix=True))


def _end(thread: LoopThread, stack: Stack) -> None:
    thread.run(stack.__aexit__())
    thread.close()
