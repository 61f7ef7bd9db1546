"""Records the results of a sweep, and the page that shows them."""

from pathlib import Path

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Sweep

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def record(sweep: Sweep) -> None:
    """Replaces the last sweep and `docs/models.md`."""
    supported_models.write(sweep)
    PAGE.write_text(supported_models.page(sweep))
