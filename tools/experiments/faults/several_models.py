"""Serves several models with two gateways, sends requests at random through each kind of client, and kills a model.

Each answer must be, to the letter, the one that the model gives in a stack of its own.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

import msgspec
import nats
import openai

from pagewire import Client, SamplingParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import resident_bytes
from pagewire.embedded.programs import GATEWAY
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import ModelNotFound, Unavailable
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.settings.config import Settings
from pagewire.shared.subjects import GENERATE, model_token
from pagewire.shared.telemetry import logs

PROMPTS = (
    "Once upon a time",
    "The little house",
    "A fox and a hen",
    "Alice was",
    "It rained",
    "The king said",
    "Two",
    "I",
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
AT_ONCE = 8
"""Requests of one client that are under way at once."""
TIMEOUT = 120.0
"""Seconds until a request's deadline."""

Texts = Mapping[str, Sequence[str]]
"""The right text for each prompt, by model."""
Ask = Callable[[str, str], Awaitable[str]]
"""Sends a prompt to a model; returns the text."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of all services of one model, and its return."""

    model: str
    refused: float
    """Longest time in seconds until a request for the model was refused while it was away."""
    refusals: int
    back: float
    """Seconds from the kill to the first right answer."""
    others: int
    """Right answers of the other models meanwhile."""


@dataclass
class Figures:
    """Results of the experiment."""

    alone: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds to the start of a stack with one model, and megabytes of its processes, by model."""
    together: tuple[float, float] = (0.0, 0.0)
    """Seconds until ready and megabytes of the stack with all models."""
    right: dict[str, int] = field(default_factory=dict)
    """Right answers by kind of client."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of all other answers."""
    kill: Kill | None = None


def main(arguments: list[str]) -> int:
    """Prints tables and writes `--output`; returns 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments several_models", description=__doc__)
    text = "models; by default the bundled one, and two with its shape and random weights"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    parser.add_argument("--requests", type=int, default=500, help="requests through each kind of client")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of models, prompts and gateways")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="experiment")
    figures = asyncio.run(measure(models_of(options.models), options.requests, options.seed))
    print("\n".join(tables(figures)))
    write(options.output, parser.prog, arguments, **asdict(figures))
    return 1 if figures.wrong else 0


def models_of(names: Sequence[str]) -> list[Settings]:
    """Returns the settings of the named models, or else of three small ones."""
    common = Settings(max_model_len=128, num_kv_blocks=128, port=0, nats_port=0, log_level="error", device="cpu")
    if names:
        return [msgspec.structs.replace(common, model=name) for name in names]
    bundled = msgspec.structs.replace(common, model="bundled")
    return [bundled] + [
        msgspec.structs.replace(bundled, load_format="dummy", seed=seed, served_model_name=f"random-{seed}")
        for seed in (1, 2)
    ]


async def measure(models: Sequence[Settings], requests: int, seed: int) -> Figures:
    """Serves each model alone, then all of them, and returns what was right, how long it took and how much it held."""
    figures, texts = Figures(), dict[str, list[str]]()
    for settings in models:
        began = time.monotonic()
        async with Stack(settings) as stack:
            address = await stack.ready()
            figures.alone[served_name(settings)] = time.monotonic() - began, megabytes()
            async with AsyncExitStack() as closing:
                (ask, *_) = (await clients(closing, [address.http], address.nats)).values()
                texts[served_name(settings)] = [await ask(served_name(settings), prompt) for prompt in PROMPTS]
    first, *others = models
    began = time.monotonic()
    async with AsyncExitStack() as closing:
        stack = await closing.enter_async_context(Stack(first, others=others))
        address = await stack.ready()
        figures.together = time.monotonic() - began, megabytes()
        user, password = stack.operator
        beside = msgspec.structs.replace(first, nats_url=address.nats, nats_user=user, nats_password=password)
        gateway = await closing.enter_async_context(Stack(beside, (GATEWAY,)))
        doors = [address.http, (await gateway.ready()).http]
        asks = await clients(closing, doors, address.nats)
        for kind, ask in asks.items():
            right, wrong = await send(ask, texts, requests, random.Random(f"{seed} {kind}"))
            figures.right[kind] = right
            figures.wrong += [f"{kind}: {each}" for each in wrong]
        figures.kill = await kill(stack, served_name(others[0] if others else first), asks["pagewire.Client"], texts)
    return figures


async def clients(closing: AsyncExitStack, doors: Sequence[str], broker: str) -> dict[str, Ask]:
    """Opens a client of each kind; those of HTTP use the `doors` in turn."""
    http = [
        await closing.enter_async_context(openai.AsyncOpenAI(base_url=f"{door}/v1", api_key="none", max_retries=0))
        for door in doors
    ]
    connection = await nats.connect(broker)
    closing.push_async_callback(connection.close)
    client = closing.enter_context(Client(broker))
    turns = iter(range(1 << 30))

    async def by_http(model: str, prompt: str) -> str:
        extra = {"ignore_eos": True}
        done = await http[next(turns) % len(http)].completions.create(
            model=model, prompt=prompt, max_tokens=GREEDY.max_tokens, temperature=0, extra_body=extra, timeout=TIMEOUT
        )
        return done.choices[0].text

    async def by_nats(model: str, prompt: str) -> str:
        body = msgspec.json.encode({"prompt": prompt, "sampling": GREEDY, "timeout_ms": int(TIMEOUT * 1000)})
        reply = await connection.request(f"{GENERATE}.{model_token(model)}", body, timeout=TIMEOUT)
        result = msgspec.json.decode(reply.data)
        return str(result["choices"][0]["text"] if "choices" in result else result)

    async def by_client(model: str, prompt: str) -> str:
        result = await asyncio.to_thread(client.generate, prompt, GREEDY, model=model, timeout=TIMEOUT)
        return result.choices[0].text

    return {"openai": by_http, "nats": by_nats, "pagewire.Client": by_client}


async def send(ask: Ask, texts: Texts, requests: int, chance: random.Random) -> tuple[int, list[str]]:
    """Sends requests for random models; returns how many answers were right, and descriptions of the others."""
    wrong: list[str] = []
    todo = iter([(chance.choice(sorted(texts)), chance.randrange(len(PROMPTS))) for _ in range(requests)])

    async def one_after_the_other() -> None:
        for model, number in todo:
            try:
                text = await ask(model, PROMPTS[number])
            except Exception as error:  # noqa: BLE001 - every failure is a wrong answer
                text = f"{type(error).__name__}: {error}"
            if text != texts[model][number]:
                wrong.append(f"{model} answers {PROMPTS[number]!r} with {text!r}")

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return requests - len(wrong), wrong


async def kill(stack: Stack, model: str, ask: Ask, texts: Texts) -> Kill:
    """Kills all services of a model, and asks this one and the others until it is back."""
    names = [name for name in stack.programs if name.endswith(f"/{model}")]
    began = time.monotonic()
    for name in names:
        if (process := stack.pid(name)) is not None:
            os.kill(process, signal.SIGKILL)
    counts, longest = Counter[str](), 0.0
    while True:
        for other in sorted(texts.keys() - {model}):
            counts["others"] += await ask(other, PROMPTS[0]) == texts[other][0]
        asked_at = time.monotonic()
        try:
            text = await ask(model, PROMPTS[0])
        except (ModelNotFound, Unavailable):
            counts["refusals"] += 1
            longest = max(longest, time.monotonic() - asked_at)
        else:
            assert text == texts[model][0], f"{model} is back and answers {text!r}"
            return Kill(model, longest, counts["refusals"], time.monotonic() - began, counts["others"])


def megabytes() -> float:
    """Returns the megabytes that the processes of the stacks hold."""
    return sum(size for name, size in resident_bytes().items() if name != "client") / 1e6


def tables(figures: Figures) -> list[str]:
    """Returns the results in Markdown."""
    stacks = [*figures.alone.items(), ("all together", figures.together)]
    starts = [f"{name} | {seconds:.1f} | {size:.0f}" for name, (seconds, size) in stacks]
    answers = [f"{kind} | {right}" for kind, right in figures.right.items()]
    lines = [*markdown("stack | start, s | memory, MB", starts), "", *markdown("client | right answers", answers), ""]
    if (end := figures.kill) is not None:
        refusals = f"{end.refusals} requests refused, after {end.refused:.2f} s at most"
        lines.append(
            f"{end.model} killed: {refusals}; right again after {end.back:.1f} s; the others: {end.others} right"
        )
    return [*lines, *figures.wrong]
