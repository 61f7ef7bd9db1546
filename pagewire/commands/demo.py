"""Starts a stack, streams one generation, prints its timings, and stops everything."""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from pagewire.client.async_client import AsyncClient
from pagewire.commands import session, waterfall
from pagewire.embedded.stack import Stack
from pagewire.shared import flags, spans
from pagewire.shared.config import Settings
from pagewire.shared.errors import Internal
from pagewire.shared.messages.client import SamplingParams

PROMPT = "Once upon a time"
SAMPLING = SamplingParams(max_tokens=96, temperature=0.8, seed=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting."""
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Uses the default model and free ports, unless told otherwise."""
    with tempfile.TemporaryDirectory(prefix="pagewire-trace-") as folder:
        settings = session.quiet(flags.read_settings(given), port=0, nats_port=0, trace_dir=folder)
        return session.run(_demo(settings), settings)


async def _demo(settings: Settings) -> int:
    request_id = secrets.token_hex(8)
    started = time.monotonic()
    async with Stack(settings) as stack:
        address = await stack.ready()
        print(f"ready {address.http} {address.nats} after {time.monotonic() - started:.1f} s\n", file=sys.stderr)
        async with AsyncClient(address.nats, api_key=settings.api_key) as client:
            await _generate(client, request_id)
    # The services write their last spans when they end.
    found = waterfall.of_request(spans.read(Path(settings.trace_dir)), request_id)
    if not found:
        raise Internal("the services wrote no spans of the request")
    print("\n".join(waterfall.draw(found)))
    print()
    for stage, (seconds, share) in waterfall.shares(found).items():
        print(f"{stage:<10}{seconds * 1000:>10.1f} ms {share:>7.1%}")
    return 0


async def _generate(client: AsyncClient, request_id: str) -> None:
    """Prints the text as it comes, then what a client sees of its speed."""
    print(PROMPT, end="", flush=True)
    sent = time.monotonic()
    arrivals: list[float] = []
    stream = client.stream(PROMPT, SAMPLING, request_id=request_id)
    async for delta in stream:
        arrivals += [time.monotonic()] * len(delta.token_ids)
        print(delta.text, end="", flush=True)
    print("\n")
    print(f"time to first token {(arrivals[0] - sent) * 1000:.1f} ms")
    if len(arrivals) > 1:
        rate = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
        print(f"{len(arrivals)} tokens, {rate:.1f} tokens/s after the first")
    print()
