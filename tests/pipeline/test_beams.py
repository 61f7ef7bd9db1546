"""Beam search through the whole pipeline: what `transformers` finds, whatever else runs, and nothing is left behind."""

import asyncio
from typing import Any

import pytest

from pagewire import SamplingParams
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.errors import DeadlineExceeded, InvalidRequest
from pagewire.shared.messages import Decoder, unpack
from pagewire.shared.messages.client import Result
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.settings.config import Settings
from tests.support.beam import BeamCase, beam_cases, transformers_beams
from tests.support.checkpoints import checkpoint, reference_logits
from tests.support.greedy import cases
from tests.support.pipeline import Pipeline, running
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

CONTEXT = 96


def settings_for(name: str = "llama", **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(checkpoint(name)),
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_kv_blocks": 512,
        "log_level": "error",
    }
    return Settings(**values | changes)


def params(case: BeamCase) -> SamplingParams:
    return SamplingParams(
        beam_width=case.width,
        n=case.n,
        length_penalty=case.length_penalty,
        max_tokens=case.max_tokens,
        stop_token_ids=[token for token in case.stop_ids if token],
    )


async def search(pipeline: Pipeline, case: BeamCase, *, stream: bool = False) -> None:
    result: Result
    if stream:
        result = await pipeline.client.stream(case.prompt, params(case)).result()
    else:
        result = await pipeline.client.generate(case.prompt, params(case))
    assert [choice.token_ids for choice in result.choices] == case.tokens
    for choice, tokens in zip(result.choices, case.tokens, strict=True):
        assert choice.finish_reason == ("stop" if tokens[-1] in case.stop_ids else "length")
    assert result.usage.completion_tokens == sum(map(len, case.tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("window", [1, 8])
async def test_successive_beam_searches_equal_transformers(name: str, window: int) -> None:
    async with running(settings_for(name, lease_window=window)) as pipeline:
        for i, case in enumerate(beam_cases(name)):
            await search(pipeline, case, stream=i % 2 == 0)
        await pipeline.until_idle()


@pytest.mark.parametrize(
    "pool", [{}, {"num_kv_blocks": 28}, {"max_num_seqs": 5}], ids=["ample", "few-blocks", "few-slots"]
)
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_beam_searches_among_other_requests_equal_transformers(pool: dict[str, Any], prefix_cache: bool) -> None:
    async def greedy(pipeline: Pipeline) -> None:
        for case in cases("llama")[:12]:
            result = await pipeline.client.generate(
                case.prompt, SamplingParams(max_tokens=case.max_tokens, temperature=0.0)
            )
            assert result.choices[0].token_ids == case.tokens

    async with running(settings_for(prefix_cache=prefix_cache, **pool)) as pipeline:
        searches = [search(pipeline, case, stream=i % 3 == 0) for i, case in enumerate(beam_cases("llama"))]
        await asyncio.gather(greedy(pipeline), *searches)
        await pipeline.until_idle()
        assert pipeline.load("scheduler")["integrity_violations"] == 0


async def test_beam_searches_of_one_request_are_independent() -> None:
    alike = [case for case in beam_cases("llama") if case.n == 1]
    first = alike[0]
    async with running(settings_for()) as pipeline:
        prompts = [first.prompt, first.prompt[::-1], first.prompt]
        results = await pipeline.client.generate(prompts, params(first))
        alone = await pipeline.client.generate(prompts[1], params(first))
        assert [choice.token_ids for choice in results.choices] == [
            first.tokens[0],
            alone.choices[0].token_ids,
            first.tokens[0],
        ]
        await pipeline.until_idle()


async def until_deep(pipeline: Pipeline, rounds: int = 20) -> None:
    """Returns once so many steps have reported candidates of all eight beams."""
    deep = asyncio.Event()
    seen = 0

    def count(message: Message) -> None:
        nonlocal seen
        pairs = unpack(Decoder(StepOutput).decode(message.data).candidate_counts)
        seen += len(pairs) == 2 * 8
        if seen >= rounds:
            deep.set()

    subscription = await pipeline.bus.subscribe(f"{subjects.STEPS}.*", count)
    async with asyncio.timeout(PATIENCE):
        await deep.wait()
    await subscription.unsubscribe()


ENDLESS = SamplingParams(beam_width=8, n=2, max_tokens=230, ignore_eos=True)


async def test_a_cancelled_search_leaves_nothing_behind() -> None:
    async with running(settings_for(max_model_len=240)) as pipeline:
        stream = pipeline.client.stream([5, 6, 7], ENDLESS)
        result = asyncio.create_task(stream.result())
        await until_deep(pipeline)
        assert pipeline.load("scheduler")["requests"] <= 1
        await stream.cancel()
        ended = await result
        assert [(choice.finish_reason, choice.token_ids) for choice in ended.choices] == [("cancelled", [])] * 2
        await pipeline.until_idle()
        await search(pipeline, beam_cases("llama")[0])


async def test_a_deadline_ends_a_search() -> None:
    async with running(settings_for(max_model_len=240, max_num_batched_tokens=32)) as pipeline:
        searching = asyncio.create_task(pipeline.client.generate([5, 6, 7], ENDLESS, timeout=0.2))
        with pytest.raises(DeadlineExceeded):
            await searching
        await pipeline.until_idle()


async def test_beams_that_can_never_run_together_are_refused() -> None:
    async with running(settings_for(num_kv_blocks=14, max_num_seqs=5)) as pipeline:
        with pytest.raises(InvalidRequest, match="KV blocks"):
            await pipeline.client.generate([1] * 8, SamplingParams(beam_width=4, max_tokens=80))
        with pytest.raises(InvalidRequest, match="beam_width must be at most 5"):
            await pipeline.client.generate([1] * 8, SamplingParams(beam_width=6, max_tokens=1))
        await pipeline.until_idle()


async def test_beam_searches_with_min_tokens_and_logprobs_equal_transformers() -> None:
    """Texts, their scores, and what is reported of their tokens; over the bus, in the result of a stream too."""
    stop_ids, folder = (0, *range(1, 60)), checkpoint("llama")
    async with running(settings_for()) as pipeline:
        for case, least in zip(beam_cases("llama")[:3], (2, 5, 9), strict=True):
            sampling = SamplingParams(
                beam_width=3, n=3, max_tokens=10, min_tokens=least, stop_token_ids=list(stop_ids[1:]), logprobs=2
            )
            expected = transformers_beams(
                folder, case.prompt, width=3, n=3, max_tokens=10, stop_ids=stop_ids, min_tokens=least
            )
            result = await pipeline.client.generate(case.prompt, sampling)
            assert [choice.token_ids for choice in result.choices] == expected
            for choice in result.choices:
                assert len(choice.token_ids) > least
                rows = reference_logits(folder, [*case.prompt, *choice.token_ids]).log_softmax(1)[
                    len(case.prompt) - 1 :
                ]
                own = [float(row[token]) for row, token in zip(rows, choice.token_ids, strict=False)]
                assert choice.cumulative_logprob == pytest.approx(sum(own), abs=1e-3)
                assert choice.logprobs is not None
                for row, token, candidates in zip(rows, choice.token_ids, choice.logprobs, strict=False):
                    assert {token, *row.topk(2).indices.tolist()} == set(candidates)
                    assert all(
                        each.logprob == pytest.approx(float(row[id_]), abs=1e-4) for id_, each in candidates.items()
                    )
                    assert candidates[token].rank == int((row >= row[token]).sum())
        stream = pipeline.client.stream(case.prompt, sampling)
        streamed = [delta async for delta in stream]
        assert [token for delta in streamed if delta.index == 0 for token in delta.token_ids] == expected[0]
        assert all(delta.logprobs for delta in streamed)
        for refused in ({"prompt_logprobs": 1}, {"stop": ["a"]}, {"logprobs": 200}):
            with pytest.raises(InvalidRequest, match=next(iter(refused))):
                await pipeline.client.generate(case.prompt, beam_width=2, **refused)
