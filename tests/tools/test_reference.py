"""The generated pages are those in the repository."""

import pytest

from tools.reference import PAGES, ROOT


@pytest.mark.parametrize("path", PAGES)
def test_generated_pages_are_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), f"run `python -m tools.reference`: {path} is stale"
