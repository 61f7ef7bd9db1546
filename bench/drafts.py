"""Measures what drafted tokens gain: tokens per second with and without them, in turns, on the same requests.

Two stacks serve the same model, one with drafts and one without; only one has work at a time. They are started twice,
the other one first, since the order has an effect of some percent. Clients send one request after the other. The texts
of both stacks are compared: they must be equal to the letter.
"""

import argparse
import asyncio
import inspect
import itertools
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pagewire import AsyncClient, SamplingParams, StructuredOutputsParams
from pagewire.bench._common.output import add_output, markdown, spread, write
from pagewire.bench._common.stack import counters, cpu_seconds, difference
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

DATA = Path(__file__).parent / "data"
PASSAGE = 1500
"""Characters of a passage of a text."""
ADDRESS_BOOK = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 3,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 30},
                    "occupation": {"type": "string", "maxLength": 30},
                    "city": {"type": "string", "maxLength": 30},
                    "age": {"type": "integer", "minimum": 1, "maximum": 120},
                },
                "required": ["name", "occupation", "city", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}

Request = tuple[str, SamplingParams]


def code_editing() -> Iterator[Request]:
    """Yields requests to repeat a function of Python's library with one change."""
    functions: list[Callable[..., Any]] = [
        textwrap.dedent,
        textwrap.indent,
        textwrap.shorten,
        statistics.median,
        statistics.quantiles,
        json.dump,
    ]
    for function, name in itertools.product(functions, ("result", "value")):
        code = inspect.getsource(function)[:PASSAGE]
        text = f"Repeat this code without any comment, and rename the function to new_{name}:\n\n```python\n{code}```"
        yield text, SamplingParams(max_tokens=200, temperature=0.0)


def quotes() -> Iterator[Request]:
    """Yields requests to summarise a passage with quotes from it."""
    text = (DATA / "held_out.txt").read_text()
    for begin in range(0, len(text) - PASSAGE, PASSAGE):
        passage = text[begin : begin + PASSAGE]
        ask = f"{passage}\n\nQuote the three most important sentences of this passage, word for word."
        yield ask, SamplingParams(max_tokens=160, temperature=0.0)


def schema() -> Iterator[Request]:
    """Yields requests for JSON by a schema."""
    for number in range(24):
        ask = f"Invent an address book of the people of village {number}, with names, occupations, cities and ages."
        form = StructuredOutputsParams(json=ADDRESS_BOOK, disable_any_whitespace=True)
        yield ask, SamplingParams(max_tokens=200, temperature=0.7, seed=number + 1, structured_outputs=form)


def chat() -> Iterator[Request]:
    """Yields short questions, sampled as the model's publisher does."""
    for number, entry in enumerate(json.loads((DATA / "questions.json").read_text())):
        ask = f"{entry['question']} Explain the answer in a few sentences."
        yield ask, SamplingParams(max_tokens=120, temperature=0.7, top_p=0.9, seed=number + 1)


def translation() -> Iterator[Request]:
    """Yields requests to translate sentences: the answer repeats nothing of them but names."""
    for number, sentence in enumerate((DATA / "held_out.txt").read_text().split(". ")):
        if 60 <= len(sentence) <= 300:
            ask = f"Translate this sentence into French, and say nothing else:\n\n{sentence.strip()}."
            yield ask, SamplingParams(max_tokens=120, temperature=0.7, seed=number + 1)


WORKLOADS = {"code": code_editing, "quotes": quotes, "json": schema, "chat": chat, "translation": translation}


@dataclass
class Cell:
    """The figures of one workload with a number of clients."""

    workload: str
    clients: int
    without: list[float] = field(default_factory=list)
    """Tokens per second without drafts, of each round."""
    drafting: list[float] = field(default_factory=list)
    """Tokens per second with drafts, of each round."""
    cpu_without: list[float] = field(default_factory=list)
    """CPU seconds of the executor per 1,000 tokens, without drafts, of each round."""
    cpu_drafting: list[float] = field(default_factory=list)
    """CPU seconds of the executor per 1,000 tokens, with drafts, of each round."""
    drafted: int = 0
    accepted: int = 0
    different: int = 0
    """Texts that differed between the two."""

    @property
    def gains(self) -> list[float]:
        """The ratio of the two rates in each round."""
        return [after / before for after, before in zip(self.drafting, self.without, strict=True)]

    @property
    def cpu_gains(self) -> list[float]:
        """The ratio of the CPU time without drafts to that with them in each round: other programs disturb it less."""
        return [before / after for after, before in zip(self.cpu_drafting, self.cpu_without, strict=True)]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`; exit code 1 if a text differs."""
    parser = argparse.ArgumentParser(prog="pagewire bench drafts", description=__doc__)
    parser.add_argument("--model", default="", help="folder, file, hub id or short name; by default the default model")
    parser.add_argument("--quantization", choices=["auto", "none", "int8", "int4"], default="auto", help="the setting")
    parser.add_argument("--spec-type", default="", help="the method that drafts; by default suffix")
    parser.add_argument("--speculative-config", default="", help="the setting of this name, such as a draft model")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="clients at once")
    parser.add_argument("--requests", type=int, default=3, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each order in which the two start")
    parser.add_argument("--dummy", action="store_true", help="random weights: nothing can be drafted")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    cells = asyncio.run(_measure(options))
    print("\n".join(table(cells)))
    write(options.output, parser.prog, arguments, runs=[asdict(cell) for cell in cells])
    return int(any(cell.different for cell in cells))


def table(cells: Sequence[Cell]) -> list[str]:
    """Returns a line per cell, in Markdown."""
    rows = (
        f"{cell.workload}, {cell.clients} | {statistics.median(cell.without):.1f} | "
        f"{statistics.median(cell.drafting):.1f} | {spread(statistics.median(cell.gains), cell.gains)} | "
        f"{spread(statistics.median(cell.cpu_gains), cell.cpu_gains) if cell.cpu_gains else ''} | "
        f"{cell.accepted / max(cell.drafted, 1):.2f} | {cell.different}"
        for cell in cells
    )
    head = "clients at once | tokens/s without | with drafts | gain | in CPU time | accepted | texts that differ"
    return markdown(head, rows)


async def _measure(options: argparse.Namespace) -> list[Cell]:
    settings = Settings(
        model=options.model,
        quantization=options.quantization,
        device="cpu",
        nats_port=0,
        log_level="error",
        load_format="dummy" if options.dummy else "auto",
        max_model_len=2048,
        num_kv_blocks=4096,
        max_num_seqs=max(64, *options.clients),
        prefix_cache=False,
    )
    method = options.spec_type or ("auto" if options.speculative_config else "suffix")
    drafts = {"spec_type": method, "speculative_config": options.speculative_config}
    both = [msgspec.structs.replace(settings, **changes) for changes in ({"spec_type": "none"}, drafts)]
    cells = [Cell(name, count) for name in options.workloads for count in options.clients]
    for order in ((0, 1), (1, 0)):
        async with AsyncExitStack() as opened:
            sides: dict[int, tuple[AsyncClient, str]] = {}
            for side in order:  # the stack that starts first is a little slower or faster than the other one
                stack = await opened.enter_async_context(Stack(both[side], PIPELINE))
                url = (await stack.ready()).nats
                sides[side] = await opened.enter_async_context(AsyncClient(url)), url
            for client, _ in sides.values():  # the first steps of a process are slow
                await _run(client, [(*request, "") for request in itertools.islice(chat(), 2)], 2)
            for cell, number in shown(list(itertools.product(cells, range(options.rounds))), "rounds"):
                await _round(cell, sides, options.requests, 2 * number + order[0])
    return cells


async def _round(cell: Cell, sides: Mapping[int, tuple[AsyncClient, str]], each: int, number: int) -> None:
    """Runs a cell once on each side, which take turns in being the first.

    A request that is sent again, within the round or in another one, has another salt: no answer is drafted from the
    same answer.
    """
    first, different = number // 2 % 2, list(WORKLOADS[cell.workload]())
    requests = [
        (*different[place % len(different)], f"{cell.workload}-{cell.clients}-{number}-{place // len(different)}")
        for place in range(cell.clients * each)
    ]
    texts: dict[int, list[str]] = {}
    for side in (first, 1 - first):
        client, url = sides[side]
        before, spent = (await counters(url))[0], cpu_seconds()["executor"]
        texts[side], tokens, seconds = await _run(client, requests, cell.clients)
        grown, spent = difference((await counters(url))[0], before), cpu_seconds()["executor"] - spent
        (cell.drafting if side else cell.without).append(tokens / seconds)
        (cell.cpu_drafting if side else cell.cpu_without).append(1000 * spent / tokens)
        if side:
            cell.drafted += int(grown["drafted"])
            cell.accepted += int(grown["accepted"])
    cell.different += sum(a != b for a, b in zip(texts[0], texts[1], strict=True))


async def _run(
    client: AsyncClient, requests: Sequence[tuple[str, SamplingParams, str]], clients: int
) -> tuple[list[str], int, float]:
    """Sends all requests, each with its salt, so many at a time; returns the texts, the number of tokens and the
    seconds."""
    texts, tokens, numbers = [""] * len(requests), 0, iter(range(len(requests)))

    async def ask() -> None:
        nonlocal tokens
        for number in numbers:
            prompt, sampling, salt = requests[number]
            messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
            choice = (await client.chat(messages, sampling, cache_salt=salt)).choices[0]
            texts[number], tokens = choice.text, tokens + len(choice.token_ids)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(ask())
    return texts, tokens, time.perf_counter() - began
