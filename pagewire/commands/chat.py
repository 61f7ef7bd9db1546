"""Starts a conversation with the model in the terminal; an empty line ends it."""

import argparse
import asyncio

from pagewire.commands import session
from pagewire.commands.generate import add_sampling, sampling
from pagewire.shared import flags
from pagewire.shared.config import Settings
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sampling parameters and all settings."""
    add_sampling(parser)
    parser.set_defaults(max_tokens=512)
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Reads and answers lines until an empty line or the end of the input."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_chat(sampling(given, settings), settings), settings)


async def _chat(params: SamplingParams, settings: Settings) -> int:
    messages: list[dict[str, str]] = []
    async with session.connect(settings) as client:
        while line := await asyncio.to_thread(_read_line):
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                async for delta in client.stream(messages=messages, sampling=params):
                    answer += delta.text
                    print(delta.text, end="", flush=True)
            except InvalidRequest as error:
                raise InvalidRequest(f"the model refuses the conversation: {error}") from error
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
