"""Measures a long prompt on an executor that has a share of a core.

The bundled model, whose context is extended, reads one prompt with all cores, and one while the executor is in a cgroup
with that share. A process that is slow lives: there must be one term, and each token of the prompt must be
computed once.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._chaos.starvation import starve
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import counters
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared import subjects
from pagewire.shared.bus import nats
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.process.peers import Peers
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

DEADLINE = 6000.0
"""Seconds that a request has."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    share: float
    """Share of a core that the executor had; 1: all cores."""
    tokens: int
    first_token: float
    """Seconds to the first token."""
    computed: int
    """Tokens of prompts that the executor has computed."""
    executors: int
    """Processes of the executor that have run meanwhile."""
    terms: int
    """Terms that have run meanwhile."""


def main(arguments: list[str]) -> int:
    """Prints a table; the exit code is 1 if a prompt was computed twice, or in more than one term."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments slow_prompt", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens of a prompt")
    parser.add_argument("--share", type=float, default=0.1, help="share of a core")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="bench")
    prompts = asyncio.run(measure(options.tokens, options.share))
    raw = [asdict(prompt) for prompt in prompts]
    print("\n".join(table(raw)))
    write(options.output, parser.prog, arguments, runs=raw)
    return int(any(prompt.computed > prompt.tokens or prompt.terms > 1 for prompt in prompts))


def table(prompts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line per prompt, in Markdown."""
    header = "share of a core | tokens of the prompt | computed | terms | executors | first token s"
    return markdown(
        header,
        [
            f"{'all cores' if raw['share'] == 1 else format(raw['share'], '.0%')} | {raw['tokens']} | {raw['computed']}"
            f" | {raw['terms']} | {raw['executors']} | {raw['first_token']:.1f}"
            for raw in prompts
        ],
    )


async def measure(tokens: int, share: float) -> list[Prompt]:
    """Reads a prompt with all cores, and another one with a share of one."""
    with tempfile.TemporaryDirectory() as folder:
        model = extended(Path(folder) / "model", 2 * tokens)
        settings = Settings(
            model=str(model),
            device="cpu",
            max_model_len=tokens + 16,
            nats_port=0,
            prefix_cache=False,
            log_level="error",
        )
        async with Stack(settings, PIPELINE) as stack:
            url = (await stack.ready()).nats
            return [await _read(stack, url, tokens, each) for each in (1.0, share)]


def extended(folder: Path, context: int) -> Path:
    """Writes a copy of the bundled model with another length of the context; returns its folder."""
    shutil.copytree(BUNDLED, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": context}))
    return folder


async def _read(stack: Stack, url: str, tokens: int, share: float) -> Prompt:
    user, password = stack.operator
    bus = await nats.connect(
        url, name="bench", user=user, password=password, inbox_prefix=subjects.service_inbox("supervisor")
    )
    peers, runs = Peers(bus), set[tuple[str, int]]()
    await peers.listen("executor", lambda: runs.update((beat.instance, beat.term) for beat in peers.alive("executor")))
    executor = stack.pid("executor")
    assert executor is not None
    (before,) = await counters(url)
    starving = asyncio.create_task(starve(executor, DEADLINE, share)) if share < 1 else None
    began = time.monotonic()
    try:
        async with AsyncClient(url) as client:
            prompt = [3 + (7919 * position + int(share * 100)) % 3000 for position in range(tokens)]
            async for _ in client.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True), timeout=DEADLINE):
                break
        first_token = time.monotonic() - began
    finally:
        if starving is not None:
            starving.cancel()
            with suppress(asyncio.CancelledError):
                await starving
    await asyncio.sleep(1.0)  # the next heartbeats
    (after,) = await counters(url)
    await bus.close()
    executors, terms = {instance for instance, _ in runs}, {term for _, term in runs if term}
    computed = int(after["prefilled"] - (before["prefilled"] if len(executors) == 1 else 0))
    return Prompt(share, tokens, first_token, computed, len(executors), len(terms))
