"""Drafted tokens never change what clients get: texts, tokens and log-probabilities, whatever a request asks for."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pagewire import SamplingParams, StructuredOutputsParams
from pagewire.services.executor.speculation.drafter import Drafter
from pagewire.services.executor.speculation.earlier_outputs import EarlierOutputs
from pagewire.services.executor.speculation.text_drafters import SuffixDrafter
from pagewire.shared.messages.client import Result, TokenLogprobs
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.drafters import drafting, guessing, knowing, wrong
from tests.support.interpreted import interpreted
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

PROMPTS: list[str | list[int]] = ["A train, a train, a train", "The market", [5 + place % 7 for place in range(40)]]
SHORT = PROMPTS[1:2]
TIMEOUT = 1000.0
"""Seconds that a request may take: Triton's interpreter is slow."""
PLAIN: dict[str, Any] = {"seed": 3, "temperature": 0.0, "ignore_eos": True}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}}
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"n": 3, "temperature": 1.0},
    {"stop": ["e", "th"], "min_tokens": 6},
    {"stop_token_ids": [*range(60, 120)], "min_tokens": 5, "ignore_eos": False},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4, "temperature": 0.4},
    {"logit_bias": {17: 4.0, 30: -5.0}, "logprobs": 3, "prompt_logprobs": 2},
    {"allowed_token_ids": [*range(40, 60)], "logprobs": 0},
    {"bad_words": ["the", " a train", "e"], "temperature": 0.7},
    {"logprobs": 2, "temperature": 1.0, "max_tokens": 17},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"structured_outputs": StructuredOutputsParams(json=PERSON)},
    {"structured_outputs": StructuredOutputsParams(json=PERSON), "temperature": 1.0, "logprobs": 1},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|ac)+d"), "frequency_penalty": 0.5},
    {"structured_outputs": StructuredOutputsParams(choice=["The train left the station.", "The market"])},
    {"beam_width": 2, "seed": None, "max_tokens": 6},
]


class Served(NamedTuple):
    results: list[Result]
    load: dict[str, float]


async def serve(prompts: Sequence[str | list[int]] = PROMPTS, tokens: int = 32, **settings: Any) -> Served:
    """Sends all requests at once, whose answers have up to so many `tokens`."""
    values: dict[str, Any] = {"model": str(checkpoint("llama")), "device": "cpu", "log_level": "error", "seed": 1}
    async with running(Settings(**values | {"num_kv_blocks": 400, "max_model_len": 120} | settings)) as pipeline:
        several = [{**fields, "max_tokens": min(fields.get("max_tokens", tokens), tokens)} for fields in FIELDS]
        requests = [(prompt, SamplingParams(**PLAIN | fields)) for prompt in prompts for fields in several]
        results = await asyncio.gather(
            *(
                pipeline.client.generate(prompt, params, return_token_ids=True, timeout=TIMEOUT)
                for prompt, params in requests
            )
        )
        await pipeline.until_idle()
        assert (pipeline.load("scheduler")["preemptions"] > 0) == (settings.get("num_kv_blocks", 400) < 100)
        return Served(results, pipeline.load("executor"))


@pytest.fixture(scope="module")
async def plain() -> Served:
    """Answers without drafts."""
    return await serve(spec_type="none")


def texts_of(served: Served) -> list[list[int]]:
    """The tokens of each prompt with each of its answers."""
    return [
        [*(result.prompt_token_ids or [[]])[0], *choice.token_ids]
        for result in served.results
        for choice in result.choices
    ]


def check(served: Served, expected: Served) -> None:
    for result, known in zip(served.results, expected.results, strict=True):
        assert [choice_of(choice) for choice in result.choices] == [choice_of(choice) for choice in known.choices]
        assert result.prompt_logprobs == known.prompt_logprobs


def choice_of(choice: Any) -> tuple[Any, ...]:
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs


def drafter_of(kind: str, texts: list[list[int]]) -> Drafter | None:
    """Returns the drafter of a kind; None: the one of the settings."""
    drafters = {"right": knowing, "wrong": wrong, "random": guessing}
    if kind in drafters:
        return drafters[kind](texts)
    return SuffixDrafter(24, 2.0, 0.1) if kind == "suffix" else None


TIGHT: dict[str, Any] = {"num_kv_blocks": 16, "max_num_batched_tokens": 48}


def beside(name: str) -> dict[str, Any]:
    """Settings of a draft model."""
    return {"speculative_config": json.dumps({"method": "draft_model", "model": str(checkpoint(name))})}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("right", {}),
        ("wrong", {"lease_window": 1}),
        ("random", TIGHT),
        ("suffix", {"prefix_cache": False}),
        ("right model", TIGHT | beside("llama")),
        ("other model", beside("gemma3")),  # whose layers have windows
    ],
)
async def test_clients_get_the_same_whatever_is_drafted(plain: Served, kind: str, settings: dict[str, Any]) -> None:
    with drafting(drafter_of(kind, texts_of(plain))) as opened:
        served = await serve(**settings)
    check(served, plain)
    speculator = opened[0]
    assert speculator.drafted > 0
    if kind == "wrong":
        assert speculator.accepted < 0.01 * speculator.drafted, "a token of another text may be right by chance"
    if kind == "right":
        assert served.load["rows"] < 0.6 * plain.load["rows"]
    if kind == "right model":
        assert speculator.accepted > 0.5 * speculator.drafted, "penalties and grammars make it wrong"


TOKENS = 12
"""Tokens of an answer, at most."""
CUDA: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8}
"""Settings of a GPU that Triton's interpreter stands for."""


@pytest.fixture(scope="module")
async def plain_on_cuda() -> Served:
    """Answers of a GPU without drafts; they are short, since the interpreter is slow."""
    with interpreted():
        return await serve(SHORT, TOKENS, **CUDA)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("right", {"spec_type": "suffix"}),
        ("wrong", {"spec_type": "suffix"}),
        ("random", {"spec_type": "suffix"}),
        ("suffix", {"spec_type": "suffix"}),
        ("right model", beside("llama")),
        ("other model", beside("gemma3")),
    ],
)
async def test_clients_of_a_gpu_get_the_same_whatever_is_drafted(
    plain_on_cuda: Served, kind: str, settings: dict[str, Any]
) -> None:
    with interpreted(), drafting(drafter_of(kind, texts_of(plain_on_cuda))) as opened:
        served = await serve(SHORT, TOKENS, **CUDA | settings)
    for result, known in zip(served.results, plain_on_cuda.results, strict=True):
        for choice, same in zip(result.choices, known.choices, strict=True):
            assert choice_of(choice)[:-1] == choice_of(same)[:-1]
            check_logprobs(choice.logprobs or (), same.logprobs or ())
    assert opened[0].drafted > 0
    if kind in ("right", "wrong", "right model"):
        assert (opened[0].accepted > 0.5 * opened[0].drafted) == (kind != "wrong")


def check_logprobs(reports: Sequence[TokenLogprobs], known: Sequence[TokenLogprobs]) -> None:
    for report, same in zip(reports, known, strict=True):
        assert [(token, entry.rank) for token, entry in report.items()] == [
            (token, entry.rank) for token, entry in same.items()
        ]
        for token, entry in report.items():
            assert entry.logprob == pytest.approx(same[token].logprob, abs=1e-4)


@pytest.mark.parametrize("method", ["suffix", "ngram"])
async def test_no_drafting_method_changes_an_answer(plain: Served, method: str) -> None:
    check(await serve(spec_type=method), plain)


async def test_an_answer_is_drafted_from_earlier_ones_of_its_own_salt_alone() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    settings = Settings(model=str(checkpoint("llama")), device="cpu", num_kv_blocks=50, log_level="error")
    accepted = []
    with drafting(SuffixDrafter(24, 2.0, 0.1, EarlierOutputs(10))) as opened:
        async with running(settings) as pipeline:
            for salt in ("a", "b", "a"):
                before = opened[0].accepted
                await pipeline.client.generate("The market", params, cache_salt=salt)
                accepted.append(opened[0].accepted - before)
    assert accepted[1] == accepted[0] < 10
    assert accepted[2] > 20
