"""Streams one completion to the terminal, from a running stack or from one that is started for it."""

import argparse
from typing import Any

from pagewire.commands import session
from pagewire.shared import flags
from pagewire.shared.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, how to continue it, and every setting."""
    parser.add_argument("text", metavar="TEXT", help="what to continue")
    add_sampling(parser)
    flags.add_settings(parser)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 64) -> None:
    """How tokens are chosen. The names are those of `SamplingParams`; the model chooses what is left out."""
    group = parser.add_argument_group("sampling", "what is left out is the model's own choice")
    text = f"tokens to generate at most; default: {max_tokens}"
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=text)
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="X", help="smallest set of likeliest tokens with this mass")
    group.add_argument("--top-k", type=int, metavar="N", help="the k likeliest tokens; 0 is all")
    group.add_argument("--min-p", type=float, metavar="X", help="tokens this likely, relative to the likeliest")
    group.add_argument("--stop", action="append", metavar="TEXT", help="string that ends the text; may be repeated")
    text = "the model's own end does not end the text"
    group.add_argument("--ignore-eos", action="store_true", default=None, help=text)


def given_sampling(given: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns the sampling parameters that the flags name. `--seed`, a setting as well, makes sampling repeatable."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos")
    fields = {name: getattr(given, name) for name in names} | {"seed": settings.seed or None}
    return {name: value for name, value in fields.items() if value is not None}


def run(given: argparse.Namespace) -> int:
    """Prints the text as it comes."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_generate(given.text, given_sampling(given, settings), settings), settings)


async def _generate(text: str, sampling: dict[str, Any], settings: Settings) -> int:
    async with session.connect(settings) as client:
        print(text, end="", flush=True)
        async for delta in client.stream(text, **sampling):
            print(delta.text, end="", flush=True)
        print()
    return 0
