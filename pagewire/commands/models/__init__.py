"""Lists the models with a short name or the families that can be served, or removes a fetched model."""

import argparse

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Outcome
from pagewire.shared.models import model_folder, named_models
from pagewire.shared.models.named_models import DEFAULT, NAMED_MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to remove a model and to list families."""
    parser.add_argument("--remove", metavar="NAME", help="delete this fetched model")
    parser.add_argument(
        "--supported", action="store_true", help="list every model_type of config.json, and why some are refused"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per model: name, size, whether it is fetched, and a description; or one per family."""
    if arguments.supported:
        return _print_supported()
    if arguments.remove is not None:
        print(f"removed {named_models.remove(arguments.remove)}")
        return 0
    for model in NAMED_MODELS.values():
        state = "here" if model.is_fetched else "to fetch"
        default = " (default)" if model is DEFAULT else ""
        print(f"{model.name:<24}{model.size / 1e6:>8.0f} MB  {state:<10}{model.about}{default}")
    size = sum(file.stat().st_size for file in model_folder.BUNDLED.iterdir())
    about = "a small storyteller that comes with Pagewire"
    print(f"{named_models.BUNDLED:<24}{size / 1e6:>8.0f} MB  {'here':<10}{about}")
    return 0


def _print_supported() -> int:
    sweep = supported_models.read()
    for family in sweep.families:
        answer = "yes" if family.outcome in {Outcome.NATIVE, Outcome.EXACT} else f"no: {family.detail}"
        print(f"{family.model_type:<26}{answer}")
    print(supported_models.summary(sweep))
    print(supported_models.summary_of_architectures(sweep))
    return 0
