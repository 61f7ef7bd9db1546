"""Rows that bring no token, one or several in a step: the clients get the same tokens, frames and log-probabilities."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from pagewire import SamplingParams
from pagewire.services.executor import devices
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.sim.device import SimDevice
from pagewire.shared.messages.client import Choice, Delta, Result
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

PROMPTS = [[5 + (seed * 31 + place) % 300 for place in range(length)] for seed, length in enumerate((3, 40, 21, 8))]
PLAIN: dict[str, Any] = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
ASKED: list[dict[str, Any]] = [
    PLAIN | {"n": 2, "logprobs": 2, "prompt_logprobs": 1},
    PLAIN | {"stop_token_ids": list(range(40)), "min_tokens": 5},
    PLAIN | {"stop": ["e", "t", "a"], "min_tokens": 3, "logprobs": 0},
    PLAIN | {"max_tokens": 1},
]


async def serve(most: int, **settings: Any) -> tuple[list[Result], list[list[Delta]]]:
    """Returns the results of all requests, and the deltas of the same ones as streams, for rows of `most` tokens."""

    def open_(capacity: Capacity, *others: Any) -> SimDevice:
        return SimDevice(replace(capacity, max_row_tokens=most), *others)

    values: dict[str, Any] = {
        "model": str(checkpoint("llama")),
        "device": "sim:zero",
        "log_level": "error",
        "max_model_len": 80,
    }
    with patch.object(devices, "SimDevice", open_):
        async with running(Settings(**values | settings)) as pipeline:
            client = pipeline.client

            async def stream(prompt: list[int], params: SamplingParams) -> list[Delta]:
                return [delta async for delta in client.stream(prompt, params)]

            requests = [(prompt, SamplingParams(**each)) for prompt in PROMPTS for each in ASKED]
            results = await asyncio.gather(*(client.generate(*request) for request in requests))
            streams = await asyncio.gather(*(stream(*request) for request in requests))
            await pipeline.until_idle()
            assert (pipeline.load("scheduler")["preemptions"] > 0) == ("num_kv_blocks" in settings)
    return results, streams


async def test_clients_get_the_same_however_many_tokens_a_row_has() -> None:
    expected, frames = await serve(1)
    tight = {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 16}
    for most, settings in ((3, {}), (3, tight), (2, {"lease_window": 1})):
        results, streams = await serve(most, **settings)
        for result, known in zip(results, expected, strict=True):
            assert [choice_of(each) for each in result.choices] == [choice_of(each) for each in known.choices]
            assert result.prompt_logprobs == known.prompt_logprobs
        for deltas, known_deltas in zip(streams, frames, strict=True):
            assert sorted(map(frame_of, deltas)) == sorted(map(frame_of, known_deltas))
    reasons = {choice.finish_reason for result in expected for choice in result.choices}
    assert reasons == {"stop", "length"}


def choice_of(choice: Choice) -> tuple[Any, ...]:
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs


def frame_of(delta: Delta) -> tuple[Any, ...]:
    assert len(delta.token_ids) == 1
    return delta.index, delta.start, delta.text, delta.token_ids, str(delta.logprobs)
