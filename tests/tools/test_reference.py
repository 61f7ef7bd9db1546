"""The generated pages are those in the repository."""

import pytest

from tools.reference import PAGES, ROOT


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_what_the_code_says(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), f"run `python -m tools.reference`: {path} is stale"
