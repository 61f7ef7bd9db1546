"""Talks with the model in the terminal; an empty line ends it."""

import argparse
import asyncio

from pagewire.commands import session
from pagewire.commands.generate import add_sampling, sampling
from pagewire.shared import flags
from pagewire.shared.config import Settings
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and every setting."""
    add_sampling(parser)
    parser.set_defaults(max_tokens=512)
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Reads a line, answers it, until an empty line or the end of the input."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_chat(sampling(given, settings), settings), settings)


async def _chat(params: SamplingParams, settings: Settings) -> int:
    messages: list[dict[str, str]] = []
    async with session.connect(settings) as client:
        while line := await asyncio.to_thread(_ask):
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                async for delta in client.stream(messages=messages, sampling=params):
                    answer += delta.text
                    print(delta.text, end="", flush=True)
            except InvalidRequest as error:
                raise InvalidRequest(f"this model cannot chat: {error}") from error
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
