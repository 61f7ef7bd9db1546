"""Compares answers by JSON schemas with and without drafted tokens: they must be equal to the token.

Each line of `--file` is JSON with `name` and `schema`, such as JSONSchemaBench. One stack after the other answers the
same requests, the first one without drafts. Returns 1 if an answer differs.
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagewire import AsyncClient, SamplingParams, StructuredOutputsParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import counters, difference
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import RequestError
from pagewire.shared.models.named_models import BUNDLED
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings

SIDES: dict[str, dict[str, Any]] = {
    "none": {"spec_type": "none"},
    "suffix": {"spec_type": "suffix"},
    "ngram": {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 2}'},
    "draft_model": {"speculative_config": f'{{"model": "{BUNDLED}"}}'},
}
"""Settings of each stack; the draft model is the model itself."""
MAX_TOKENS = 96
TEMPERATURES = (0.0, 0.7, 1.3)


@dataclass
class Side:
    """The answers of one stack."""

    method: str
    refused: int = 0
    """Schemas that are refused by name."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    different: list[str] = field(default_factory=list)
    """Names of the schemas whose answers differ from those without drafts."""


def main(arguments: list[str]) -> int:
    """Prints a line per stack and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments drafted_schemas", description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="file of schemas")
    parser.add_argument("--model", default=BUNDLED, help="folder, file, hub id or short name")
    parser.add_argument("--methods", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    add_output(parser)
    options = parser.parse_args(arguments)
    lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    methods = ["none", *(method for method in options.methods if method != "none")]
    sides = asyncio.run(measure(lines, options.model, methods, options.clients))
    print("\n".join(table(sides, len(lines))))
    write(options.output, parser.prog, arguments, schemas=len(lines), runs=[asdict(side) for side in sides])
    return int(any(side.different for side in sides))


async def measure(lines: Sequence[dict[str, Any]], model: str, methods: Sequence[str], clients: int) -> list[Side]:
    """Answers each schema on one stack after the other."""
    sides: list[Side] = []
    expected: list[list[int] | None] = []
    for method in methods:
        side = Side(method)
        settings = Settings(model=model, device="cpu", nats_port=0, log_level="error", **SIDES[method])
        async with Stack(settings, PIPELINE) as stack:
            url = (await stack.ready()).nats
            async with AsyncClient(url) as client:
                before = (await counters(url))[0]
                answers = await _answers(client, lines, clients)
                grown = difference((await counters(url))[0], before)
        expected = expected or answers
        side.drafted, side.accepted = int(grown["drafted"]), int(grown["accepted"])
        side.refused, side.tokens = answers.count(None), sum(len(answer or ()) for answer in answers)
        pairs = zip(lines, answers, expected, strict=True)
        side.different = [line["name"] for line, answer, known in pairs if answer != known]
        sides.append(side)
    return sides


async def _answers(client: AsyncClient, lines: Sequence[dict[str, Any]], clients: int) -> list[list[int] | None]:
    """Returns the tokens of each answer; None: its schema is refused."""
    answers: list[list[int] | None] = [None] * len(lines)
    numbers = iter(shown(range(len(lines)), "schemas"))

    async def ask() -> None:
        for number in numbers:
            sampling = SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=TEMPERATURES[number % len(TEMPERATURES)],
                seed=number + 1,
                structured_outputs=StructuredOutputsParams(json=lines[number]["schema"]),
            )
            try:
                result = await client.generate("An example, in JSON: ", sampling)
            except RequestError:
                continue
            answers[number] = result.choices[0].token_ids

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(ask())
    return answers


def table(sides: Iterable[Side], schemas: int) -> list[str]:
    """Returns a line per stack, in Markdown."""
    rows = (
        f"{side.method} | {schemas - side.refused} of {schemas} | {side.tokens} | {side.drafted} | "
        f"{side.accepted / max(side.drafted, 1):.2f} | {len(side.different)}"
        for side in sides
    )
    return markdown("drafts | schemas answered | tokens | drafted | accepted | answers that differ", rows)
