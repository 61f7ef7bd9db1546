"""Streams a completion to the terminal; starts a stack unless one is running."""

import argparse
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec

from pagewire.commands import session
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the text, the sampling parameters and all settings."""
    text = "text to continue; without it, or with -, the text on standard input"
    parser.add_argument("text", nargs="?", default="-", metavar="TEXT", help=text)
    parser.add_argument("--json", action="store_true", help="print the whole result as one line of JSON")
    add_sampling(parser)
    flags.add_settings(parser)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 64) -> None:
    """Adds a flag for every sampling parameter that fits one, with its name, type and description."""
    group = parser.add_argument_group("sampling", "the model's generation_config decides what is left out")
    descriptions = flags.describe(SamplingParams)
    for name, options in _FIELDS.items():
        text = descriptions[name].replace("%", "%%")
        group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **options)
    parser.set_defaults(max_tokens=max_tokens)


def sampling_of(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns the sampling parameters of the flags. The setting `--seed` makes sampling repeatable."""
    fields = {name: value for name, value in vars(arguments).items() if name in _FIELDS}
    return fields | ({"seed": settings.seed} if settings.seed else {})


def _flags() -> dict[str, dict[str, Any]]:
    """Returns argparse's options for each field that has a flag."""
    options: dict[str, dict[str, Any]] = {}
    for field in msgspec.structs.fields(SamplingParams):
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        items = [item for kind in kinds if get_origin(kind) is list for item in get_args(kind)]
        if field.name in _WITHOUT_FLAG:
            continue
        if items:
            options[field.name] = {"type": items[0], "action": "append", "metavar": items[0].__name__.upper()}
        elif kinds[0] is bool:
            options[field.name] = {"action": argparse.BooleanOptionalAction}
        elif kinds[0] in (int, float):
            options[field.name] = {"type": kinds[0], "metavar": "N" if kinds[0] is int else "X"}
    return options


_WITHOUT_FLAG = {"n", "seed", "logprobs", "prompt_logprobs"}
"""Fields without a flag: one completion is printed, without log-probabilities, and `--seed` is a setting."""
_FIELDS = _flags()


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and then the completion as it arrives."""
    settings = session.quiet(flags.read_settings(arguments))
    text = arguments.text if arguments.text != "-" else session.piped_text()
    if text is None:
        raise ConfigurationError("there is no text to continue: give TEXT, or pipe one into the command")
    return session.run(_generate(text, sampling_of(arguments, settings), settings, as_json=arguments.json), settings)


async def _generate(text: str, sampling: dict[str, Any], settings: Settings, *, as_json: bool) -> int:
    async with session.connect(settings) as client:
        if as_json:
            print(msgspec.json.encode(await client.generate(text, **sampling)).decode())
            return 0
        unprinted = text  # printed with the first token, so that an error before it stands alone
        try:
            async for delta in client.stream(text, **sampling):
                print(unprinted + delta.text, end="", flush=True)
                unprinted = ""
        finally:
            if not unprinted:
                print()
    return 0
