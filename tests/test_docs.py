"""The documents: every link leads somewhere, and every command that they name exists."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagewire.commands.parser import parsers

ROOT = Path(__file__).parents[1]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
COMMAND = re.compile(r"(?:^ {4}|^|`)(?:\S+/bin/)?pagewire ([a-z-]+)", re.MULTILINE)
TARGET = re.compile(r"(?:^ {4}|`)make ([a-z][a-z-]*)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:pagewire|tools|tests)[\w.]*\w)")
MAKEFILE = (ROOT / "Makefile").read_text()


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and mkdocs derive them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}")
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    text = page.read_text()
    assert set(COMMAND.findall(text)) <= parsers().keys()
    assert all(f"\n{target}:" in MAKEFILE for target in TARGET.findall(text))
    assert all(find_spec(module) for module in MODULE.findall(text))


def test_the_index_names_every_page_and_example() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    files = {page.name for page in ROOT.glob("docs/*.md")} | {path.name for path in ROOT.glob("examples/*.py")}
    assert not {name for name in files - {"index.md"} if f"{name})" not in index and f"{name}#" not in index}
