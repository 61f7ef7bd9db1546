"""Fetches a model by its short name or hub id, and prints where it is."""

import argparse

from pagewire.shared import model_folder
from pagewire.shared.named_models import NAMED_MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name."""
    names = ", ".join(NAMED_MODELS)
    parser.add_argument("name", metavar="NAME", help=f"{names}, or a hub id such as org/name")


def run(given: argparse.Namespace) -> int:
    """Does nothing but print where it is if it is here already."""
    print(model_folder.resolve(given.name))
    return 0
