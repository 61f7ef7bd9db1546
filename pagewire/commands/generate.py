"""Streams one completion to the terminal, from a running stack or from one that is started for it."""

import argparse

from pagewire.commands import session
from pagewire.shared import flags
from pagewire.shared.config import Settings
from pagewire.shared.messages.client import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, how to continue it, and every setting."""
    parser.add_argument("text", metavar="TEXT", help="what to continue")
    add_sampling(parser)
    flags.add_settings(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; the names are those of the request."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=64, help="tokens to generate at most")
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="smallest set of likeliest tokens with this mass")
    group.add_argument("--top-k", type=int, default=0, help="the k likeliest tokens; 0 is all")
    group.add_argument("--min-p", type=float, default=0.0, help="tokens this likely, relative to the likeliest")
    group.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="the model's own end does not end the text")


def sampling(given: argparse.Namespace, settings: Settings) -> SamplingParams:
    """The sampling that the flags ask for. `--seed`, a setting as well, makes it repeatable."""
    return SamplingParams(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        stop=given.stop,
        ignore_eos=given.ignore_eos,
        seed=settings.seed or None,
    )


def run(given: argparse.Namespace) -> int:
    """Prints the text as it comes."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_generate(given.text, sampling(given, settings), settings), settings)


async def _generate(text: str, params: SamplingParams, settings: Settings) -> int:
    async with session.connect(settings) as client:
        print(text, end="", flush=True)
        async for delta in client.stream(text, params):
            print(delta.text, end="", flush=True)
        print()
    return 0
