"""Starts a stack, streams the answer to a question, shows the time of each stage, and stops the stack."""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from pagewire.client.async_client import AsyncClient
from pagewire.commands import session
from pagewire.commands.timings import Timings
from pagewire.commands.trace import waterfall
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import Internal
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.models import named_models
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import span_files

QUESTION = "Give me three tips for writing clear English."
SAMPLING = SamplingParams(max_tokens=160, temperature=0.0)
STORY = "Tell me a story about a king and a fox."
"""The question for the bundled model, which can only tell stories."""
STORY_SAMPLING = SamplingParams(max_tokens=96, temperature=0.8, seed=1)
NEXT = """\
What to type next:
  pagewire chat                          talk with the model in the terminal
  pagewire serve                         serve it over HTTP and NATS; then, for instance:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
  pagewire --help                        everything else; README.md and docs/ say more"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all settings."""
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Uses the default model and free ports unless they are set."""
    with tempfile.TemporaryDirectory(prefix="pagewire-trace-") as folder:
        settings = session.quiet(flags.read_settings(arguments), port=0, nats_port=0, trace_dir=folder, api_key_file="")
        return session.run(_demo(settings), settings)


async def _demo(settings: Settings) -> int:
    request_id = secrets.token_hex(8)
    started = time.monotonic()
    async with Stack(settings) as stack:
        address = await stack.ready()
        print(f"ready {address.http} {address.nats} after {time.monotonic() - started:.1f} s\n", file=sys.stderr)
        async with AsyncClient(address.nats, api_key=settings.api_key) as client:
            timings = await _ask(client, request_id)
    # Read after the stack has ended, because the services write their last spans on exit.
    request_spans = span_files.of_request(span_files.read(Path(settings.trace_dir)), request_id)
    if not request_spans:
        raise Internal("the services wrote no spans of the request")
    print(f"{timings}\n")
    for stage, (seconds, share) in waterfall.shares(request_spans).items():
        print(f"{stage:<10}{seconds * 1000:>10.1f} ms {share:>7.1%}")
    print()
    print("\n".join(waterfall.draw(request_spans)))
    print(f"\n{NEXT}")
    return 0


async def _ask(client: AsyncClient, request_id: str) -> Timings:
    """Prints the question, and the answer as it arrives; returns the timings."""
    model, *_ = await client.models()
    is_bundled = model.name == named_models.BUNDLED
    question, sampling = (STORY, STORY_SAMPLING) if is_bundled else (QUESTION, SAMPLING)
    print(f"{model.name} is asked: {question}\n", flush=True)
    timings = Timings()
    async for delta in client.stream_chat(
        [{"role": "user", "content": question}], sampling, request_id=request_id, timeout=300.0
    ):
        timings.count(len(delta.token_ids))
        print(delta.text, end="", flush=True)
    print("\n")
    return timings
