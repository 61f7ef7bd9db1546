"""Log-probabilities of prompts and of tokens are those of transformers, however the executor has come by them."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagewire import AsyncClient, SamplingParams, StructuredOutputsParams
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import InvalidRequest, PayloadTooLarge
from pagewire.shared.messages.client import Delta, Result, TokenLogprobs
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import VOCABULARY, checkpoint, reference_logits
from tests.support.interpreted import interpreted
from tests.support.pipeline import running
from tests.support.processes import kill

pytestmark = pytest.mark.anyio

FOLDER = checkpoint("llama")
TOLERANCE = 1e-4
PROMPTS = [
    [5 + (seed * 31 + place * place * 7) % 300 for place in range(length)] for seed, length in enumerate((3, 40))
]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 3}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.0, "top_k": 40, "seed": 7, "n": 2, "logprobs": 0}


def check(report: TokenLogprobs, row: torch.Tensor, token: int, most: int) -> None:
    """Compares the report of a token with the logits [V] that it comes from."""
    expected = row.log_softmax(0)
    assert next(iter(report)) == token
    assert most <= len(report) <= most + 1
    for other, entry in report.items():
        assert entry.logprob == pytest.approx(float(expected[other]), abs=TOLERANCE)
        assert entry.rank is not None
        ties = int((row - row[other]).abs().lt(TOLERANCE).sum()) - 1
        assert abs(entry.rank - int((row >= row[other]).sum())) <= ties
    best = sorted((entry.logprob for other, entry in report.items() if entry.rank and entry.rank <= most), reverse=True)
    np.testing.assert_allclose(best, expected.topk(most).values.numpy()[: len(best)], atol=TOLERANCE)
    assert len(best) >= most


def check_result(result: Result, prompt: Sequence[int], fields: dict[str, Any]) -> None:
    check_tokens(result, prompt, fields)
    assert result.prompt_token_ids == [list(prompt)]
    assert result.prompt_logprobs is not None
    (of_prompt,) = result.prompt_logprobs
    assert of_prompt[0] is None
    rows = reference_logits(FOLDER, prompt)
    for position, report in enumerate(of_prompt[1:], 1):
        assert report is not None
        check(report, rows[position - 1], prompt[position], fields["prompt_logprobs"])


def check_tokens(result: Result, prompt: Sequence[int], fields: dict[str, Any]) -> None:
    """Compares the report of the generated tokens with the logits of transformers."""
    for choice in result.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == fields["max_tokens"]
        rows = reference_logits(FOLDER, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
        for row, token, report in zip(rows, choice.token_ids, choice.logprobs, strict=False):
            check(report, row, token, fields["logprobs"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.full)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with interpreted():
        yield request.param


@pytest.mark.parametrize(("window", "budget"), [(1, 512), (8, 16)])
async def test_log_probabilities_equal_transformers(device: str, window: int, budget: int) -> None:
    """Whole prompts and chunks, with a cold and a warm prefix cache, with preemptions, and in streams."""
    settings = Settings(
        model=str(FOLDER),
        device=device,
        dtype="float32",
        lease_window=window,
        max_num_batched_tokens=budget,
        num_kv_blocks=24,
        block_size=4,
        max_model_len=80,
        log_level="error",
    )
    async with running(settings) as pipeline:
        client = pipeline.client
        requests = [(prompt, fields) for prompt in PROMPTS for fields in (GREEDY, SAMPLED)] * 2
        results = await asyncio.gather(
            *(client.generate(prompt, SamplingParams(**fields)) for prompt, fields in requests)
        )
        streamed: list[Delta] = [delta async for delta in client.stream(PROMPTS[1], SamplingParams(**GREEDY))]
        plain = await client.generate(PROMPTS[1], max_tokens=3)
        fields = GREEDY | {"prompt_logprobs": None}
        fresh = [*range(300, 340)]
        cold, warm = [await client.generate(fresh, SamplingParams(**fields)) for _ in range(2)]
        await pipeline.until_idle()
        assert pipeline.load("scheduler")["preemptions"] > 0
    for (prompt, fields), result in zip(requests, results, strict=True):
        check_result(result, prompt, fields)
    for again in (cold, warm):
        check_tokens(again, fresh, GREEDY)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 36)
    whole = next(result for (_, fields), result in zip(requests[2:], results[2:], strict=True) if fields is GREEDY)
    report = [each for delta in streamed for each in delta.logprobs or ()]
    assert [token for delta in streamed for token in delta.token_ids] == whole.choices[0].token_ids
    assert [list(each) for each in report] == [list(each) for each in whole.choices[0].logprobs or ()]
    assert (plain.choices[0].logprobs, plain.prompt_logprobs, plain.prompt_token_ids) == (None, None, None)


TOWNS = StructuredOutputsParams(
    json={
        "type": "array",
        "minItems": 40,
        "items": {
            "type": "object",
            "properties": {"market_town": {"enum": ["small", "large"]}, "trains": {"type": "integer"}},
            "required": ["market_town", "trains"],
            "additionalProperties": False,
        },
    },
    disable_any_whitespace=True,
)
"""A schema whose texts consist of forced tokens for the most part."""


@pytest.mark.alone
async def test_log_probabilities_survive_a_killed_executor() -> None:
    """So does a text with a grammar, whose forced tokens are reported many at a time."""
    settings = Settings(model=str(FOLDER), dtype="float32", num_kv_blocks=160, nats_port=0, log_level="error")
    fields = GREEDY | {"max_tokens": 120}
    async with Stack(settings, PIPELINE) as stack, AsyncClient((await stack.ready()).nats) as client:
        structured = SamplingParams(max_tokens=200, temperature=1.0, seed=4, structured_outputs=TOWNS)
        towns = await client.generate(PROMPTS[0], structured)
        again = asyncio.create_task(client.generate(PROMPTS[0], structured))
        others = [asyncio.create_task(client.generate(PROMPTS[1], SamplingParams(**fields))) for _ in range(2)]
        report: list[TokenLogprobs] = []
        tokens: list[int] = []
        async for delta in client.stream(PROMPTS[1], SamplingParams(**fields)):
            if len(tokens) == 20:
                kill("executor")
            tokens += delta.token_ids
            report += delta.logprobs or ()
        results = await asyncio.gather(*others)
        assert (await again).choices[0].token_ids == towns.choices[0].token_ids
    rows = reference_logits(FOLDER, [*PROMPTS[1], *tokens])
    assert len(tokens) == len(report) == 120
    for position, token in enumerate(tokens):
        check(report[position], rows[len(PROMPTS[1]) + position - 1], token, 5)
    for result in results:
        check_result(result, PROMPTS[1], fields)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
async def test_each_logprobs_mode_reports_its_values(device: str, mode: Any) -> None:
    settings = Settings(
        model=str(FOLDER),
        device=device,
        dtype="float32",
        num_kv_blocks=64,
        logprobs_mode=mode,
        max_logprobs=4,
        log_level="error",
    )
    prompt, bias = PROMPTS[1], {9: 4.0, 10: -100.0}
    async with running(settings) as pipeline:
        drawn = SamplingParams(max_tokens=6, temperature=0.5, top_k=3, logprobs=4, logit_bias=bias, ignore_eos=True)
        result = await pipeline.client.generate(prompt, drawn)
        with pytest.raises(InvalidRequest, match="logprobs must be between 0 and 4, not 5"):
            await pipeline.client.generate(prompt, logprobs=5)
        form = StructuredOutputsParams(regex="[ab]{2,9}")
        masked = await pipeline.client.generate(prompt, max_tokens=9, logprobs=3, seed=2, structured_outputs=form)
        texts = [await pipeline.client.detokenize([token]) for token in range(VOCABULARY)]
    (choice,) = result.choices
    assert choice.logprobs is not None
    rows = reference_logits(FOLDER, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
    for row, token, report in zip(rows, choice.token_ids, choice.logprobs, strict=False):
        expected = row.clone()
        if mode.startswith("processed"):
            for biased, value in bias.items():
                expected[biased] += value
            expected /= 0.5
            expected[expected < expected.topk(3).values[-1]] = -torch.inf
        if mode.endswith("logprobs"):
            expected = expected.log_softmax(0)
        assert next(iter(report)) == token
        for other, entry in report.items():
            assert entry.logprob == pytest.approx(max(float(expected[other]), -9999.0), abs=5 * TOLERANCE)
        if mode.startswith("processed"):
            assert sum(entry.logprob > -9999 for entry in report.values()) == 3
    check_masked(mode, prompt, masked, texts)


def check_masked(mode: str, prompt: list[int], result: Result, texts: list[str]) -> None:
    """Behind a grammar's mask nothing is left of the tokens that it forbids."""
    (choice,) = result.choices
    assert choice.logprobs is not None
    rows = reference_logits(FOLDER, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
    for place, (row, token, report) in enumerate(zip(rows, choice.token_ids, choice.logprobs, strict=False)):
        so_far = sum(map(len, map(texts.__getitem__, choice.token_ids[:place])))
        fitting = [i for i, text in enumerate(texts) if re.fullmatch(f"[ab]{{1,{9 - so_far}}}", text)]
        allowed = [*fitting, *([0] if so_far >= 2 else [])] if so_far < 9 else [0]
        expected = row.clone()
        if mode.startswith("processed"):
            expected[[i for i in range(VOCABULARY) if i not in allowed]] = -torch.inf
        if mode.endswith("logprobs"):
            expected = expected.log_softmax(0)
        assert token in allowed
        for other, entry in report.items():
            assert entry.logprob == pytest.approx(max(float(expected[other]), -9999.0), abs=TOLERANCE)


async def test_a_report_that_fits_into_no_message_is_refused() -> None:
    settings = Settings(model=str(FOLDER), dtype="float32", num_kv_blocks=64, log_level="error")
    async with running(settings) as pipeline:
        with pytest.raises(PayloadTooLarge, match="prompt_logprobs"):
            await pipeline.client.generate([[7] * 200] * 256, max_tokens=1, prompt_logprobs=20)
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            await pipeline.client.generate([7], beam_width=2, prompt_logprobs=1)
