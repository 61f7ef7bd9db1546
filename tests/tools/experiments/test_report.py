"""The pages say what the raw results say, and every raw result says where it comes from."""

import json
import re
from pathlib import Path

import pytest

from tools.experiments import report
from tools.experiments.report import PAGES, PICTURES, RESULTS, TABLES, contents, filled, origin

BENCHMARKS, README, *OTHERS = PAGES
MOST_WORDS = 800
"""Outside the tables."""
RAW = sorted(RESULTS.glob("*.json"))


def test_pages_and_pictures_equal_the_commands_output() -> None:
    for file, text in contents().items():
        assert file.read_text() == text, f"{file} differs: run `python -m tools.experiments report`"


def test_the_page_can_be_read() -> None:
    prose = [line for line in BENCHMARKS.read_text().splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= MOST_WORDS


@pytest.mark.parametrize("file", RAW, ids=lambda file: file.name)
def test_a_raw_result_names_its_origin_and_is_shown(file: Path) -> None:
    header = json.loads(file.read_text())
    assert header["command"].startswith(("pagewire bench ", "python -m tools.experiments ", "make "))
    assert header["machine"]
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", header["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", header["date"])
    assert any(origin(file) in page.read_text() for page in (BENCHMARKS, *OTHERS))


def test_every_table_and_picture_has_its_place() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    assert all(f"<!-- table: {name} -->" in pages for name in TABLES)
    assert all(f"({Path('../bench/results')}/{name}.svg)" in pages for name in PICTURES)
    assert {file.name for file in RESULTS.iterdir()} == {
        *(file.name for file in RAW),
        *(f"{name}.svg" for name in PICTURES),
    }


def test_a_table_is_replaced_as_a_whole() -> None:
    page = "a\n<!-- table: one -->\nold\nolder\n<!-- end -->\nb\n<!-- table: two -->\n<!-- end -->\n"
    text = filled(page, {"one": lambda: ["| 1 |"], "two": lambda: ["| 2 |", "| 3 |"]})
    assert text == "a\n<!-- table: one -->\n| 1 |\n<!-- end -->\nb\n<!-- table: two -->\n| 2 |\n| 3 |\n<!-- end -->\n"
    assert filled(text, {"one": lambda: ["| 1 |"], "two": lambda: ["| 2 |", "| 3 |"]}) == text


def test_the_command_writes_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(report, "contents", lambda: {page: "made\n"})
    assert report.main([]) == 0
    assert page.read_text() == "made\n"
    assert str(page) in capsys.readouterr().out
