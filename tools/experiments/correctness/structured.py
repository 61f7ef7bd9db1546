"""Measures structured outputs: which of many JSON schemas compile, whether what ends validates, and what masks cost.

`--schemas` is a file of JSONSchemaBench: lines of JSON with a `name` and a `schema`. Each schema is asked for once
of each model: the given one, and a small one with random weights, which would never write JSON by itself. Then 64 rows
decode side by side, once all without a grammar and once with 16 that have one; the two take turns.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagewire import AsyncClient, SamplingParams, StructuredOutputsParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import counters, cpu_seconds
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import InvalidRequest, PagewireError, Unavailable
from pagewire.shared.messages.client import Choice
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

RANDOM = "random weights"
CLOSING = {'"': 11.0, "}": 6.0, "]": 6.0}
"""Biases of the model with random weights, which would hardly ever end a string otherwise."""
TOKENS = 160
"""Maximum tokens of an output."""
PATIENCE = 5
"""Maximum times that a request is sent again."""
ROWS, STRUCTURED = 64, 16
STEADY = 128
"""Tokens of each row whose times are taken."""
PEOPLE = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""A schema whose texts do not end within `STEADY` tokens."""


@dataclass
class Outputs:
    """Results of the schemas with one model."""

    model: str
    schemas: int = 0
    compiled: int = 0
    ended: int = 0
    """Outputs that ended by themselves."""
    valid: int = 0
    """Outputs, of those that ended, that match their schema."""
    tokens: int = 0
    """Tokens of all outputs."""
    rows: float = 0.0
    """Rows of steps that they took: fewer where a grammar forces tokens."""
    failed: dict[str, str] = field(default_factory=dict)
    """Names of schemas whose request failed for another reason, and the error."""
    invalid: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Reasons, with the number of schemas."""
    seconds: float = 0.0


@dataclass
class Times:
    """Milliseconds per token of the rows of one kind: the mean of each turn."""

    rows: str
    mean_ms: list[float] = field(default_factory=list)
    median_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Milliseconds of the executor's CPU time per token of the whole batch, which other programs hardly change."""


def main(arguments: list[str]) -> int:
    """Prints two tables and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments structured", description=__doc__)
    parser.add_argument("--schemas", type=Path, help="file of schemas; without it, only times are taken")
    parser.add_argument("--limit", type=int, help="number of schemas")
    parser.add_argument("--compact", action="store_true", help="ask for JSON without whitespace")
    parser.add_argument("--turns", type=int, default=3, help="turns of the two batches; 0: no times are taken")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder, file or short name")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="bench")
    schemas = _read(options.schemas)[: options.limit] if options.schemas else []
    outputs, times = asyncio.run(_measure(options.model, schemas, options.turns, compact=options.compact))
    print("\n".join([*output_table(outputs), "", *time_table(times)]))
    write(
        options.output,
        parser.prog,
        arguments,
        outputs=[asdict(each) for each in outputs],
        times=[asdict(each) for each in times],
    )
    return 0


def output_table(outputs: Sequence[Outputs]) -> list[str]:
    """Returns a line per model, in Markdown."""
    return markdown(
        "model | schemas | compile | ended by themselves | of these valid | steps per token",
        (
            f"{each.model} | {each.schemas} | {each.compiled} ({each.compiled / each.schemas:.1%})"
            f" | {each.ended} | {each.valid} | {f'{each.rows / each.tokens:.2f}' if each.tokens else ''}"
            for each in outputs
        ),
    )


def time_table(times: Sequence[Times]) -> list[str]:
    """Returns a line per kind of row, in Markdown; ratios are those of the means, against the first line."""
    first = statistics.mean(times[0].mean_ms) if times else 0.0
    return markdown(
        "rows | mean ms per token | median | against 64 plain rows | CPU ms per token of the batch",
        (
            f"{each.rows} | {statistics.mean(each.mean_ms):.2f} | {statistics.mean(each.median_ms):.2f}"
            f" | {statistics.mean(each.mean_ms) / first:.3f} | {statistics.mean(each.cpu_ms):.3f}"
            for each in times
        ),
    )


async def _measure(
    model: str, schemas: list[dict[str, Any]], turns: int, *, compact: bool
) -> tuple[list[Outputs], list[Times]]:
    outputs: list[Outputs] = []
    with tempfile.TemporaryDirectory() as folder:
        if schemas:
            bias = _write_random(model, Path(folder))
            async with _stack(folder) as stack:
                outputs.append(await _ask(stack, RANDOM, schemas, compact=compact, logit_bias=bias))
        times: list[Times] = []
        async with _stack(model) as stack:
            if schemas:
                outputs.append(await _ask(stack, model, schemas, compact=compact))
            if turns:
                times = await _times(stack, turns)
        return outputs, times


def _stack(model: str) -> Stack:
    settings = Settings(model=model, nats_port=0, max_num_seqs=ROWS, max_model_len=1024, log_level="error")
    return Stack(settings, PIPELINE)


async def _ask(stack: Stack, name: str, schemas: list[dict[str, Any]], *, compact: bool, **fields: Any) -> Outputs:
    """Asks for a text of each schema, `ROWS` at a time."""
    results, refused, began = (
        Outputs(name + ", no whitespace" * compact, len(schemas)),
        Counter[str](),
        time.monotonic(),
    )
    turn = asyncio.Semaphore(ROWS)

    async def one(client: AsyncClient, number: int, name: str, schema: dict[str, Any]) -> None:
        form = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=compact)
        sampling = SamplingParams(max_tokens=TOKENS, seed=number, structured_outputs=form, **fields)
        async with turn:
            try:
                choice = await _patiently(client, f"An example of {name} in JSON:\n", sampling)
            except InvalidRequest as error:
                refused[error.message.partition("cannot be compiled: ")[2].split("\n")[0][:60]] += 1
                return
            except PagewireError as error:
                results.failed[name] = str(error)
                return
        results.compiled += 1
        results.tokens += len(choice.token_ids)
        if choice.finish_reason == "stop":
            results.ended += 1
            if _is_valid(choice.text, schema):
                results.valid += 1
            else:
                results.invalid.append(name)

    address = await stack.ready()
    (before,) = await counters(address.nats)
    async with AsyncClient(address.nats) as client, asyncio.TaskGroup() as tasks:
        for number, line in enumerate(schemas):
            tasks.create_task(one(client, number, line["name"], line["schema"]))
    (after,) = await counters(address.nats)
    results.rows = after["rows"] - before["rows"]
    results.refused = dict(refused.most_common())
    results.seconds = round(time.monotonic() - began, 1)
    return results


async def _patiently(client: AsyncClient, prompt: str, sampling: SamplingParams) -> Choice:
    """Returns the only choice. Asks again if a service was replaced, as on a machine that is too busy."""
    for _ in range(PATIENCE):
        with suppress(Unavailable):
            return (await client.generate(prompt, sampling, timeout=600)).choices[0]
    return (await client.generate(prompt, sampling, timeout=600)).choices[0]


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    import jsonschema  # needed for development only

    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def _times(stack: Stack, turns: int) -> list[Times]:
    plain, beside = Times("plain, all 64"), Times(f"plain, {ROWS - STRUCTURED} beside {STRUCTURED} structured")
    structured = Times(f"structured, {STRUCTURED} of 64")
    address = await stack.ready()
    async with AsyncClient(address.nats) as client:
        await _batch(client, STRUCTURED)  # compiles the grammar
        for _ in range(turns):
            before = cpu_seconds()["executor"]
            _note(plain, await _batch(client, 0), cpu_seconds()["executor"] - before)
            before = cpu_seconds()["executor"]
            rows = await _batch(client, STRUCTURED)
            used = cpu_seconds()["executor"] - before
            _note(structured, rows[:STRUCTURED], used)
            _note(beside, rows[STRUCTURED:], used)
    return [plain, beside, structured]


def _note(times: Times, rows: list[list[float]], cpu_s: float) -> None:
    """Adds the milliseconds between the tokens of some rows, and what their batch cost."""
    times.cpu_ms.append(cpu_s * 1e3 / (ROWS * STEADY))
    gaps = [(after - before) * 1e3 for row in rows for before, after in pairwise(row)]
    times.mean_ms.append(statistics.mean(gaps))
    times.median_ms.append(statistics.median(gaps))


async def _batch(client: AsyncClient, structured: int) -> list[list[float]]:
    """Decodes `ROWS` rows side by side, the first ones with a grammar; returns when each token came, while all ran."""

    async def row(number: int) -> list[float]:
        form = StructuredOutputsParams(json=PEOPLE) if number < structured else None
        sampling = SamplingParams(max_tokens=STEADY, seed=number, ignore_eos=True, structured_outputs=form)
        prompt = f"A list of {number + 20} people as JSON, each with a name, an age and tags:\n"
        return [time.perf_counter() async for _ in client.stream(prompt, sampling, timeout=600)]

    rows = await asyncio.gather(*(row(number) for number in range(ROWS)))
    began, ended = max(row[0] for row in rows), min(row[-1] for row in rows)
    return [[moment for moment in row if began <= moment <= ended] for row in rows]


def _write_random(model: str, folder: Path) -> dict[int, float]:
    """Writes a small model with random weights and the tokenizer of `model`; returns the biases `CLOSING` by token."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig  # takes seconds

    path = model_folder.resolve(model)
    tokenizer = load_tokenizer(path).to_transformers()
    eos = sorted(model_folder.eos_ids(path))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.25,
        eos_token_id=eos,
        bos_token_id=eos[0],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {tokenizer.encode(text, add_special_tokens=False)[-1]: bias for text, bias in CLOSING.items()}


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
