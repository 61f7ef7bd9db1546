"""Fetches a model by its short name or hub id, and prints its path."""

import argparse

from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import NAMED_MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model's name."""
    names = ", ".join(NAMED_MODELS)
    parser.add_argument("name", metavar="NAME", help=f"{names}, or a hub id such as org/name")


def run(arguments: argparse.Namespace) -> int:
    """Fetches the model unless it is here already, and prints its path."""
    print(model_folder.resolve(arguments.name))
    return 0
