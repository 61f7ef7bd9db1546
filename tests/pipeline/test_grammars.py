"""Texts follow the form that a request asks for, through all services, whatever the model would rather say."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest

from pagewire import SamplingParams, StructuredOutputsParams
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

FOLDER = "llama"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "kind": {"enum": ["child", "adult"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}], "triggers": ["<c"]}


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_compact(text: str) -> bool:
    return is_person(text) and not set(text) & set(" \n\t\r")


def has_no_open_call(text: str) -> bool:
    calls = re.findall("<c(.*?)</call>", text)
    return all(call.startswith("all>") and is_person(call.removeprefix("all>")) for call in calls)


FORMS: dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]] = {
    "json": (StructuredOutputsParams(json=PERSON), is_person),
    "json text": (StructuredOutputsParams(json=json.dumps(PERSON), disable_any_whitespace=True), is_compact),
    "json_object": (StructuredOutputsParams(json_object=True), is_object),
    "regex": (StructuredOutputsParams(regex="(ab|c){3,5}!"), re.compile("(ab|c){3,5}!").fullmatch),
    "choice": (StructuredOutputsParams(choice=["north", "no", "south"]), {"north", "no", "south"}.__contains__),
    "lark": (StructuredOutputsParams(grammar='start: "[" start "]" | "x"'), re.compile(r"\[*x\]*").fullmatch),
    "gbnf": (StructuredOutputsParams(grammar='root ::= "yes" | "no" root'), re.compile("(no)*yes").fullmatch),
    "structural_tag": (StructuredOutputsParams(structural_tag=TAG), has_no_open_call),
}


def settings_of(**more: Any) -> Settings:
    return Settings(model=str(checkpoint(FOLDER)), dtype="float32", log_level="error", **more)


async def test_every_form_is_kept_through_preemptions() -> None:
    """Sequences are preempted and computed again: their grammars are rebuilt from the tokens so far."""
    async with running(settings_of(num_kv_blocks=56, block_size=4, max_model_len=100)) as pipeline:
        client = pipeline.client

        async def texts(form: StructuredOutputsParams | None, temperature: float) -> list[tuple[str, str]]:
            n = 2 if temperature else 1
            sampling = SamplingParams(
                max_tokens=60, seed=5, temperature=temperature, n=n, structured_outputs=form, logprobs=1
            )
            choices = (await client.generate("The morning train", sampling)).choices
            assert all(len(choice.logprobs or []) == len(choice.token_ids) for choice in choices)
            return [(choice.text, choice.finish_reason) for choice in choices]

        requests = [(form, heat) for form, _ in FORMS.values() for heat in (0.0, 1.0)]
        alone = [await texts(form, heat) for form, heat in requests]
        assert await asyncio.gather(*(texts(form, heat) for form, heat in [*requests, (None, 1.0)]))
        together = await asyncio.gather(*(texts(form, heat) for form, heat in requests))
        assert together == alone
        for (name, (_, fits)), results in zip(FORMS.items(), zip(alone[::2], alone[1::2], strict=True), strict=True):
            ended = [text for texts_ in results for text, reason in texts_ if reason == "stop"]
            assert ended or name in {"lark", "gbnf", "structural_tag", "json_object"}, name
            assert all(fits(text) for text in ended), (name, ended)
        await pipeline.until_idle()
        assert pipeline.load("scheduler")["preemptions"] > 0


async def test_a_grammar_outweighs_min_tokens_and_yields_to_stops_and_limits() -> None:
    """Below min_tokens a grammar goes on where it can, and ends where it must; stops and limits end it before."""
    async with running(settings_of(num_kv_blocks=64)) as pipeline:

        async def choice(form: StructuredOutputsParams, **fields: Any) -> Any:
            sampling = SamplingParams(temperature=0.0, structured_outputs=form, **{"max_tokens": 40, **fields})
            return (await pipeline.client.generate("The morning", sampling)).choices[0]

        long = StructuredOutputsParams(regex="(a|b)+")
        assert len((await choice(long, min_tokens=9)).token_ids) >= 9
        short = await choice(StructuredOutputsParams(choice=["one"]), min_tokens=30, ignore_eos=True)
        assert (short.text, short.finish_reason) == ("one", "stop")
        stopped = await choice(StructuredOutputsParams(regex="x{20}yx{9}"), stop=["y"])
        assert (stopped.text, stopped.stop_reason) == ("x" * 20, "y")
        cut = await choice(StructuredOutputsParams(regex="x{30}"), max_tokens=3)
        assert (set(cut.text), cut.finish_reason) == ({"x"}, "length")


COMPLEX = {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}
"""A schema that compiles, and goes beyond a limit of the library within a few tokens."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "unclosed group"),
    ({"json": {"type": "strange"}}, "Invalid type: strange"),
    ({"json": "{"}, "structured_outputs.json is malformed"),
    ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": ""}, "root"),
    ({"choice": []}, "at least one"),
    ({"choice": ["a"], "regex": "a"}, "exactly one of"),
    ({}, "exactly one of"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag"),
    ({"regex": "a" * 200_000}, "at most"),
]


async def test_a_form_that_cannot_be_compiled_fails_alone() -> None:
    async with running(settings_of(num_kv_blocks=64)) as pipeline:
        other = asyncio.create_task(pipeline.client.generate("A", SamplingParams(max_tokens=40, ignore_eos=True)))
        for fields, reason in REFUSED:
            with pytest.raises(InvalidRequest, match=re.escape(reason)):
                await pipeline.client.generate("The", structured_outputs=StructuredOutputsParams(**fields))
        form = StructuredOutputsParams(json=COMPLEX)
        with pytest.raises(InvalidRequest, match="50,000 states"):
            await pipeline.client.generate("The", SamplingParams(max_tokens=99, structured_outputs=form))
        assert len((await other).choices[0].token_ids) == 40


def nothing(_: SequenceGrammar) -> list[int]:
    return []


async def answers(forms: list[StructuredOutputsParams], *, forced: bool, **settings: Any) -> tuple[list[Any], float]:
    """Texts of many requests at once, and how many rows of steps they took."""
    fields: list[dict[str, Any]] = [
        {},
        {"n": 2, "temperature": 1.0},
        {"max_tokens": 7},
        {"stop": ["k"], "temperature": 0.7},
        {"stop_token_ids": [*range(70, 80)], "min_tokens": 9},
        {"frequency_penalty": 0.5},
        {"logprobs": 1},
    ]
    with nullcontext() if forced else patch.object(SequenceGrammar, "forced", nothing):
        async with running(settings_of(**settings)) as pipeline:

            async def one(form: StructuredOutputsParams, more: dict[str, Any]) -> Any:
                sampling = SamplingParams(
                    **{"max_tokens": 40, "temperature": 0.0, "seed": 3} | more, structured_outputs=form
                )
                choices = (await pipeline.client.stream("A train", sampling).result()).choices
                return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in choices]

            results = await asyncio.gather(*(one(form, more) for form in forms for more in fields))
            await pipeline.until_idle()
            return results, pipeline.load("executor")["rows"]


async def test_forced_tokens_equal_the_sampled_ones() -> None:
    """Also with several completions, ends of all kinds, and preemptions."""
    forms = [
        StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        StructuredOutputsParams(choice=["The market town left the station.", "The market is full of apples."]),
    ]
    settings = {"num_kv_blocks": 40, "block_size": 4, "max_model_len": 60, "max_num_batched_tokens": 48}
    expected, plain = await answers(forms, forced=False, **settings)
    results, rows = await answers(forms, forced=True, **settings)
    assert results == expected
    assert rows < 0.8 * plain
