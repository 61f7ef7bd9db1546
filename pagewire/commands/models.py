"""Lists the models with a short name, or removes a fetched one."""

import argparse

from pagewire.shared import model_folder, named_models
from pagewire.shared.named_models import DEFAULT, NAMED_MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flag to remove a model."""
    parser.add_argument("--remove", metavar="NAME", help="delete this fetched model")


def run(given: argparse.Namespace) -> int:
    """Prints one line per model: name, size, whether it is fetched, and a description."""
    if given.remove is not None:
        print(f"removed {named_models.remove(given.remove)}")
        return 0
    for model in NAMED_MODELS.values():
        state = "here" if model.is_fetched else "to fetch"
        default = " (default)" if model is DEFAULT else ""
        print(f"{model.name:<24}{model.size / 1e6:>8.0f} MB  {state:<10}{model.about}{default}")
    size = sum(file.stat().st_size for file in model_folder.BUNDLED.iterdir())
    about = "a small storyteller that comes with Pagewire"
    print(f"{named_models.BUNDLED:<24}{size / 1e6:>8.0f} MB  {'here':<10}{about}")
    return 0
