"""Sweeps every family that transformers generates text with, and every architecture of GGUF files: `make models`.

Names as arguments repeat these families alone; `--gguf` with or without names does so with architectures.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import structlog
import torch
import transformers
from gguf import MODEL_ARCH_NAMES
from msgspec import structs

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Family, Outcome
from tests.families.gguf_sweep import try_architecture
from tests.families.record import record
from tests.families.sweep import try_family
from tests.families.tiny import FAMILIES


def main() -> int:
    """Prints a line per family; returns 1 if any was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="what to repeat; without a name, everything")
    parser.add_argument("--gguf", action="store_true", help="architectures of GGUF files alone")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more would wait for each other longer than they compute
    transformers.logging.set_verbosity_error()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    sweep = supported_models.read()
    if not options.gguf:
        families = _results(options.name or FAMILIES, try_family, sweep.families if options.name else ())
        sweep = structs.replace(sweep, transformers=transformers.__version__, families=families)
    if options.gguf or not options.name:
        names = options.name or sorted(MODEL_ARCH_NAMES.values())
        architectures = _results(names, try_architecture, sweep.architectures if options.name else ())
        sweep = structs.replace(sweep, gguf=version("gguf"), architectures=architectures)
    print(supported_models.summary(sweep))
    print(supported_models.summary_of_architectures(sweep))
    record(sweep)
    bad = (Outcome.WRONG, Outcome.CRASHED)
    return int(sweep.count(*bad) + sweep.count_architectures(*bad) > 0)


def _results(
    names: Sequence[str], attempt: Callable[[str, Path], Family], earlier: tuple[Family, ...]
) -> tuple[Family, ...]:
    """Returns the results of `names`, and the `earlier` ones of all others, in order; prints a line per name."""
    results = [family for family in earlier if family.model_type not in names]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results.append(attempt(name, Path(folder)))
        print(f"{name:<24}{results[-1].outcome.value:<10}{results[-1].detail}", flush=True)
    return tuple(sorted(results, key=lambda family: family.model_type))


if __name__ == "__main__":
    raise SystemExit(main())
