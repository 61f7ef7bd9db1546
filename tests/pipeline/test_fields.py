"""Every sampling field has its effect, and is refused where it has no meaning, on each device.

The requests of a device run side by side, once. What the sampler does is compared with arithmetic on the logits of
transformers.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagewire import SamplingParams
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import Result
from pagewire.shared.settings.config import Settings
from tests.pipeline.test_logprobs import check
from tests.support.beam import EOS_ID, transformers_beams
from tests.support.checkpoints import checkpoint, reference_logits
from tests.support.distribution import Case, Float64, edited, exact
from tests.support.interpreted import interpreted
from tests.support.philox import uniforms
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

FOLDER = checkpoint("llama")
PROMPT = [7, 300, 41]
TOKENS = 3
A, B = 65, 66
"""The letters a and b."""
FAR = 1e-3
"""Least distance of a random number from where the token changes."""


def logits(output: list[int]) -> Float64:
    row: Float64 = reference_logits(FOLDER, PROMPT + output)[-1].double().numpy()
    return row


def greedy(case: Case) -> list[int]:
    """The likeliest tokens."""
    output: list[int] = []
    while len(output) < TOKENS:
        output.append(int(edited(logits(output), PROMPT, output, case).argmax()))
    return output


def drawn(seed: int, case: Case) -> tuple[int, float]:
    """The first token that a seed draws, and how far from the next token its random number is."""
    reached = np.cumsum(exact(logits([]), PROMPT, [], case))
    number = float(uniforms(np.array([sequence_key(seed, 0, 0)], np.uint64), np.array([len(PROMPT)]))[0])
    return int(np.searchsorted(reached, number)), float(np.abs(reached - number).min())


def telling_seed(case: Case) -> int:
    """A seed that draws another token than without the case, whatever is rounded."""
    for seed in range(1000):
        (token, near), (plain, near_plain) = drawn(seed, case), drawn(seed, Case())
        if token != plain and min(near, near_plain) > FAR:
            return seed
    raise AssertionError("no seed tells the two apart")


@dataclass(frozen=True)
class Asked:
    """A request."""

    fields: dict[str, Any]
    effect: Callable[[Result], Any]
    """Whether the answer shows what the field says."""
    wrong: dict[str, Any]
    """Fields of a request that is refused."""
    reason: str


def sampled(name: str, value: float, wrong: Any) -> Asked:
    case = Case({name: value})
    seed = telling_seed(case)
    fields = {"temperature": 1.0, name: value, "seed": seed, "max_tokens": 1}
    return Asked(fields, lambda found: ids(found) == [drawn(seed, case)[0]], {name: wrong}, name)


def penalized(name: str, value: float, token: int, wrong: float) -> Asked:
    """With the least bias of `token` that makes the penalty tell."""
    pairs = [(bias, Case({name: value}, {token: bias})) for bias in range(30)]
    bias, case = next((b, case) for b, case in pairs if greedy(case) != greedy(Case({}, case.bias)))
    expected = greedy(case)
    return Asked({name: value, "logit_bias": {token: bias}}, lambda found: ids(found) == expected, {name: wrong}, name)


def ids(found: Result) -> list[int]:
    return found.choices[0].token_ids


def text(found: Result) -> str:
    return found.choices[0].text


def ends(found: Result) -> tuple[str, str | int | None]:
    return found.choices[0].finish_reason, found.choices[0].stop_reason


def beams(**options: Any) -> Callable[[Result], bool]:
    expected = transformers_beams(FOLDER, PROMPT, width=2, n=2, max_tokens=TOKENS, **options)
    return lambda found: [choice.token_ids for choice in found.choices] == expected


def reports(found: Result) -> bool:
    rows = reference_logits(FOLDER, PROMPT + ids(found))[len(PROMPT) - 1 :]
    for row, token, entry in zip(rows, ids(found), found.choices[0].logprobs or (), strict=False):
        check(entry, row, token, 2)
    return len(found.choices[0].logprobs or ()) == TOKENS


def reports_prompt(found: Result) -> bool:
    ((first, *others),) = found.prompt_logprobs or [[None]]
    for row, token, entry in zip(reference_logits(FOLDER, PROMPT), PROMPT[1:], others, strict=False):
        assert entry is not None
        check(entry, row, token, 2)
    return first is None and len(others) == len(PROMPT) - 1


LETTERS: dict[str, Any] = {"allowed_token_ids": [A, B], "logit_bias": {A: 50.0}}
"""Fields that make the text a row of the letter a."""
ENDS = (EOS_ID, *range(60, 120))
"""With these a search finds other texts where length counts."""
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5}
FOREIGN = {"n", "best_of", "max_tokens", "stop", "include_stop_str_in_output", "skip_special_tokens"}
"""Fields that no device knows: the interpreted one gets no request with them."""
ONE_OF_A_KIND = ("top_p", "repetition_penalty", "bad_words", "logprobs", "structured_outputs", "beam_width")
"""A field for each way through the interpreted device's sampler, which is slow; `make test-all` sends it all others."""


@functools.cache
def fields() -> dict[str, Asked]:
    """A request for each field."""
    plain = greedy(Case())
    between = {"allowed_token_ids": [A, B], "logit_bias": {A: 49.0, B: 50.0}}
    short_beams: dict[str, Any] = {"beam_width": 2, "n": 2, "stop_token_ids": ENDS[1:], "ignore_eos": False}
    return {
        "n": Asked(
            {"n": 2, **HOT}, lambda found: len({*map(str, found.choices)}) == 2, {"n": 0}, "n must be at least 1"
        ),
        "best_of": Asked(
            {"best_of": 2, **HOT}, lambda found: len(found.choices) == 1, {"n": 2, "best_of": 1, **HOT}, "best_of"
        ),
        "max_tokens": Asked({"max_tokens": 2}, lambda found: ids(found) == plain[:2], {"max_tokens": 0}, "max_tokens"),
        "min_tokens": Asked(
            {"min_tokens": 1, "stop_token_ids": plain[:1]},
            lambda found: ids(found)[0] == int(edited(logits([]), PROMPT, [], Case(stops=(plain[0],))).argmax()),
            {"min_tokens": -1},
            "min_tokens",
        ),
        "temperature": sampled("temperature", 0.5, 3.0),
        "top_p": sampled("top_p", 0.3, 1.5),
        "top_k": sampled("top_k", 3, -2),
        "min_p": sampled("min_p", 0.3, 1.5),
        "seed": Asked(
            {"temperature": 1.0, "seed": 11, "max_tokens": 1},
            lambda found: ids(found) == [drawn(11, Case())[0]] != [drawn(telling_seed(Case({"top_k": 1})), Case())[0]],
            {"seed": 2**70},
            "seed",
        ),
        "stop": Asked(
            {"stop": "aa", **LETTERS},
            lambda found: (text(found), *ends(found)) == ("", "stop", "aa"),
            {"stop": [""]},
            "stop has an empty string",
        ),
        "include_stop_str_in_output": Asked(
            {"stop": "aa", "include_stop_str_in_output": True, **LETTERS},
            lambda found: (text(found), *ends(found)) == ("aa", "stop", "aa"),
            {"include_stop_str_in_output": "perhaps"},
            "include_stop_str_in_output",
        ),
        "stop_token_ids": Asked(
            {"stop_token_ids": plain[1:2]},
            lambda found: (ids(found), *ends(found)) == (plain[: plain.index(plain[1]) + 1], "stop", plain[1]),
            {"stop_token_ids": [512]},
            "stop_token_ids",
        ),
        "ignore_eos": Asked(
            {"allowed_token_ids": [EOS_ID], "ignore_eos": False},
            lambda found: (ids(found), *ends(found)) == ([EOS_ID], "stop", None),
            {"ignore_eos": 3},
            "ignore_eos",
        ),
        "skip_special_tokens": Asked(
            {"allowed_token_ids": [EOS_ID], "skip_special_tokens": False},
            lambda found: text(found) == "<|end|>" * TOKENS,
            {"skip_special_tokens": "no"},
            "skip_special_tokens",
        ),
        "presence_penalty": penalized("presence_penalty", 2.0, 17, 2.1),
        "frequency_penalty": penalized("frequency_penalty", 2.0, 17, -2.1),
        "repetition_penalty": penalized("repetition_penalty", 3.0, 300, 0.0),
        "logit_bias": Asked(
            {"logit_bias": {17: 100.0}},
            lambda found: ids(found) == [17] * TOKENS,
            {"logit_bias": {512: 1.0}},
            "logit_bias",
        ),
        "allowed_token_ids": Asked(
            {"allowed_token_ids": [40, 41, 42]},
            lambda found: ids(found) == greedy(Case(allowed=(40, 41, 42))),
            {"allowed_token_ids": []},
            "allowed_token_ids",
        ),
        "bad_words": Asked(
            {"bad_words": ["ab"], **between},
            lambda found: ids(found) == greedy(Case({}, {B: 50.0, A: 49.0}, (A, B), ((A, B),))),
            {"bad_words": [" "]},
            "bad_words",
        ),
        "logprobs": Asked({"logprobs": 2}, reports, {"logprobs": 21}, "logprobs must be between 0 and 20"),
        "prompt_logprobs": Asked({"prompt_logprobs": 2}, reports_prompt, {"prompt_logprobs": -2}, "prompt_logprobs"),
        "structured_outputs": Asked(
            {"structured_outputs": {"regex": "(ba)+"}},
            lambda found: text(found) == "bab",
            {"structured_outputs": {}},
            "exactly one of",
        ),
        "beam_width": Asked({"beam_width": 2, "n": 2}, beams(stop_ids=()), {"beam_width": 17}, "beam_width"),
        "length_penalty": Asked(
            {"length_penalty": 3.0, **short_beams},
            beams(stop_ids=ENDS, length_penalty=3.0),
            {"length_penalty": 2.0},
            "set beam_width too",
        ),
    }


def params(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True} | fields)


@dataclass(frozen=True)
class Answers:
    """Answers of a device to the requests of all fields."""

    results: dict[str, Result]
    refusals: dict[str, str]
    """Messages."""


async def ask(device: str, names: Sequence[str]) -> Answers:
    """Sends a device a valid request of each of the named fields, and an invalid one of every field."""
    settings = Settings(
        model=str(FOLDER),
        device=device,
        dtype="float32",
        num_kv_blocks=64,
        max_model_len=64,
        max_num_seqs=32,
        log_level="error",
    )
    with interpreted():
        async with running(settings) as pipeline:

            async def refusal(fields: dict[str, Any]) -> str:
                with pytest.raises(InvalidRequest) as raised:
                    await pipeline.client.generate(PROMPT, params(fields))
                return raised.value.message

            results = await asyncio.gather(
                *(pipeline.client.generate(PROMPT, params(fields()[name].fields)) for name in names)
            )
            refusals = await asyncio.gather(*(refusal(field.wrong) for field in fields().values()))
            await pipeline.until_idle()
    return Answers(dict(zip(names, results, strict=True)), dict(zip(fields(), refusals, strict=True)))


@pytest.fixture(scope="module", params=["cpu", "cuda", pytest.param("cuda-full", marks=pytest.mark.full)])
async def answers(request: pytest.FixtureRequest) -> Answers:
    of_device = [name for name in fields() if name not in FOREIGN]
    names = {"cpu": list(fields()), "cuda": ONE_OF_A_KIND, "cuda-full": of_device}[request.param]
    return await ask(request.param.removesuffix("-full"), names)


async def test_every_field_has_its_effect(answers: Answers) -> None:
    for name, result in answers.results.items():
        assert fields()[name].effect(result), name


async def test_every_field_is_refused_with_its_name(answers: Answers) -> None:
    for name, field in fields().items():
        assert field.reason in answers.refusals[name], name


def test_no_field_is_forgotten() -> None:
    assert set(fields()) == set(SamplingParams.__struct_fields__)
