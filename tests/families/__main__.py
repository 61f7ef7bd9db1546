"""Sweeps every family that transformers generates text with: `make models`. Names as arguments repeat these alone."""

import argparse
import tempfile
from pathlib import Path

import structlog
import torch
import transformers

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Outcome, Sweep
from tests.families.sweep import try_family
from tests.families.tiny import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> int:
    """Prints a line per family; returns 1 if any was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", help="model_type whose result is replaced; without it, all are swept")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more would wait for each other longer than they compute
    transformers.logging.set_verbosity_error()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    results = []
    for family in options.family or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            results.append(try_family(family, Path(folder)))
        print(f"{family:<24}{results[-1].outcome.value:<10}{results[-1].detail}", flush=True)
    if options.family:
        earlier = supported_models.read().families
        results += [family for family in earlier if family.model_type not in options.family]
    sweep = Sweep(transformers.__version__, tuple(sorted(results, key=lambda family: family.model_type)))
    print(supported_models.summary(sweep))
    supported_models.write(sweep)
    PAGE.write_text(supported_models.page(sweep))
    return int(sweep.count(Outcome.WRONG, Outcome.CRASHED) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
