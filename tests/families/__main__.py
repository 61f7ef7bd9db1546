"""Sweeps every family that transformers generates text with: `make models`. Names as arguments try these alone."""

import argparse
import tempfile
from pathlib import Path

import structlog
import transformers

from pagewire.shared import supported_models
from pagewire.shared.supported_models import Outcome, Sweep
from tests.families.sweep import try_family
from tests.families.tiny import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> int:
    """Prints a line per family; returns 1 if any was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", help="model_type; without it, all are swept and the page is written")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    found = []
    for family in given.family or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found.append(try_family(family, Path(folder)))
        print(f"{family:<24}{found[-1].outcome.value:<10}{found[-1].detail}", flush=True)
    sweep = Sweep(transformers.__version__, tuple(found))
    print(supported_models.summary(sweep))
    if not given.family:
        supported_models.write(sweep)
        PAGE.write_text(supported_models.page(sweep))
    return int(sweep.count(Outcome.WRONG, Outcome.CRASHED) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
