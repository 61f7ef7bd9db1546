"""Measures which JSON schemas compile, and whether random values that their grammars take are valid.

zod and pydantic, the packages themselves, make 500 schemas each; `--file` adds lines of JSON with `name` and `schema`,
such as JSONSchemaBench. `npm install --prefix FOLDER zod@4` makes the folder for `--zod`. Each schema
either compiles or is refused by the name of what is not supported; `jsonschema` judges the values against the schema as
it was sent. Returns 1 if a value is not valid.
"""

import argparse
import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import regex

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.services.tokenizer.validation.grammar_checker import GrammarChecker
from pagewire.shared.errors import ConfigurationError, InvalidRequest
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import StructuredOutputsParams
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tools.experiments.correctness.inputs.pydantic_schemas import pydantic_schemas
from tools.experiments.correctness.inputs.random_values import EOS, Unfinished, random_value

ZOD = Path(__file__).parent / "inputs" / "zod_schemas.mjs"


@dataclass(slots=True)
class Outcome:
    """The schemas of one source."""

    source: str
    schemas: int = 0
    compiled: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Names of schemas, by the reason of their refusal."""
    values: int = 0
    """Random values that ended."""
    unfinished: int = 0
    """Random values that did not end."""
    unsound: dict[str, list[Any]] = field(default_factory=dict)
    """Values that are not valid, by the name of the schema: faults."""


def main(arguments: list[str]) -> int:
    """Prints a line per source and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments schemas", description=__doc__)
    parser.add_argument("--zod", type=Path, help="folder with node_modules/zod; without it, zod makes no schemas")
    parser.add_argument("--count", type=int, default=500, help="schemas of each generator")
    parser.add_argument("--file", type=Path, action="append", default=[], help="file of schemas")
    parser.add_argument(
        "--values",
        type=int,
        default=24_000,
        help="random values, shared by all schemas that compile; one in ten does not end",
    )
    parser.add_argument("--seed", type=int, default=1)
    add_output(parser)
    options = parser.parse_args(arguments)
    lines = list(pydantic_schemas(options.count, options.seed))
    if options.zod is not None:
        lines += zod_schemas(options.zod, options.count, options.seed)
    for file in options.file:
        lines += [{**json.loads(line), "set": file.stem} for line in file.read_text().splitlines()]
    outcomes = asyncio.run(measure(lines, options.values))
    print("\n".join(table(outcomes)))
    write(options.output, parser.prog, arguments, outcomes=[asdict(each) for each in outcomes])
    return 1 if any(each.unsound for each in outcomes) else 0


def zod_schemas(folder: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields lines that zod makes, from the `node_modules` of a folder.

    Raises:
        ConfigurationError: the folder has no zod, or node fails.
    """
    if not (folder / "node_modules" / "zod").is_dir():
        raise ConfigurationError(f"{folder} has no zod: npm install --prefix {folder} zod@4")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        script = shutil.copy(ZOD, inner)  # node looks for packages in the folders above the script
        node = subprocess.run(["node", script, str(count), str(seed)], capture_output=True, text=True, check=False)
    if node.returncode:
        raise ConfigurationError(f"node failed: {node.stderr.strip().splitlines()[-1]}")
    yield from map(json.loads, node.stdout.splitlines())


async def measure(lines: Sequence[dict[str, Any]], values: int) -> list[Outcome]:
    """Compiles each schema, and draws values of those that compile."""
    tokenizer = load_tokenizer(BUNDLED).backend
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size(), {EOS})
    checker = GrammarChecker(compiler)
    outcomes = {line["set"]: Outcome(line["set"]) for line in lines}
    compiled = []
    for line in lines:
        outcome = outcomes[line["set"]]
        outcome.schemas += 1
        try:
            grammar = await checker.grammar(StructuredOutputsParams(json=line["schema"]))
        except InvalidRequest as error:
            outcome.refused.setdefault(_reason(error.message), []).append(line["name"])
        else:
            outcome.compiled += 1
            compiled.append((outcome, line, grammar))
    checker.close()
    for index, (outcome, line, grammar) in enumerate(compiled):
        judge = validator(line["schema"])
        if sys.stderr.isatty() and index % 50 == 0:
            print(f"{index} of {len(compiled)}", file=sys.stderr)
        matcher = compiler.compile(grammar)
        for seed in range(index, values, len(compiled)):
            try:
                value = random_value(matcher.deep_copy(), tokenizer, seed)
            except Unfinished:
                outcome.unfinished += 1
                continue
            outcome.values += 1
            if not judge.is_valid(value):
                outcome.unsound.setdefault(line["name"], []).append(value)
    return list(outcomes.values())


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns a line per source, in Markdown, and the reasons of refusals with their numbers."""
    lines = markdown(
        "schemas of | schemas | compiled | refused | random values | not valid",
        (
            f"{each.source} | {each.schemas} | {each.compiled} ({each.compiled / each.schemas:.1%})"
            f" | {each.schemas - each.compiled} | {each.values} | {sum(map(len, each.unsound.values()))}"
            for each in outcomes
        ),
    )
    for each in outcomes:
        reasons = Counter({reason: len(names) for reason, names in each.refused.items()})
        lines += [
            "",
            f"{each.source}, refused:",
            *(f"- {number}: {reason}" for reason, number in reasons.most_common()),
        ]
        lines += [f"- NOT VALID {name}: {values[0]!r}" for name, values in each.unsound.items()]
    return lines


def validator(schema: dict[str, Any]) -> Any:
    """Returns the judge of a schema: its patterns may have properties of Unicode, which `re` lacks, and its multiples
    are those of decimals, not of doubles."""
    kind = jsonschema.validators.validator_for(schema)
    return jsonschema.validators.extend(kind, {"pattern": _pattern, "multipleOf": _multiple})(schema)  # type: ignore[no-untyped-call]


def _pattern(_: Any, pattern: str, text: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(text, str) and not regex.search(pattern, text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


def _multiple(_: Any, factor: Any, number: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return
    if Fraction(str(number)) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{number} is no multiple of {factor}")


def _reason(message: str) -> str:
    """Returns the reason of a refusal, without where in the grammar it is."""
    reason = message.partition("cannot be compiled: ")[2] or message
    return re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", reason.split("\n")[0])[:160]
