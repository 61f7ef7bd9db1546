"""Streams one completion to the terminal; starts a stack for it unless one is running."""

import argparse

from pagewire.commands import session
from pagewire.shared import flags
from pagewire.shared.config import Settings
from pagewire.shared.messages.client import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the text, the sampling parameters and all settings."""
    parser.add_argument("text", metavar="TEXT", help="text to continue")
    add_sampling(parser)
    flags.add_settings(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the sampling parameters, named as in a request."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=64, help="maximum number of generated tokens")
    group.add_argument("--temperature", type=float, default=1.0, help="scale of randomness; 0: greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="use the likeliest tokens with this probability")
    group.add_argument("--top-k", type=int, default=0, help="use the k likeliest tokens; 0: all")
    group.add_argument("--min-p", type=float, default=0.0, help="minimum probability, relative to the likeliest")
    group.add_argument("--stop", action="append", default=[], help="string that ends the text; may be given repeatedly")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's EOS token")


def sampling(given: argparse.Namespace, settings: Settings) -> SamplingParams:
    """Returns the sampling parameters that the flags give. The setting `--seed` makes sampling repeatable."""
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
    """Prints the text as it arrives."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_generate(given.text, sampling(given, settings), settings), settings)


async def _generate(text: str, params: SamplingParams, settings: Settings) -> int:
    async with session.connect(settings) as client:
        print(text, end="", flush=True)
        async for delta in client.stream(text, params):
            print(delta.text, end="", flush=True)
        print()
    return 0
