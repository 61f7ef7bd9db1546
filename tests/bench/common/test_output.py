"""A place that cannot be written is refused before anything is measured; raw results say where they come from."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.bench import cpu_step, pipeline, quality, serve
from pagewire.bench._common import output
from pagewire.bench._common.output import commit, json_file, machine, markdown, spread, write

Main = Callable[[list[str]], int]
MAINS: list[Main] = [cpu_step.main, pipeline.main, quality.main, serve.main]


@pytest.mark.parametrize("main", MAINS)
def test_a_folder_is_no_file(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert f"{tmp_path} is a folder: name a file in it" in capsys.readouterr().err


def test_a_file_needs_a_folder_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_step.main(["--output", str(tmp_path / "none" / "a.json")])
    assert "make it first" in capsys.readouterr().err


def test_a_file_that_can_be_written_is_accepted(tmp_path: Path) -> None:
    assert json_file(str(tmp_path / "a.json")) == tmp_path / "a.json"
    assert json_file("a.json") == Path("a.json")


def test_raw_results_have_a_header(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write(file, "pagewire bench serve", ["--output", "a b.json"], simulated="one h100", runs=[{"x": 1}])
    raw = json.loads(file.read_text())
    assert raw["command"] == "pagewire bench serve --output 'a b.json'"
    assert raw["machine"] == machine()
    assert raw["commit"] == commit()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", raw["date"])
    assert (raw["simulated"], raw["runs"]) == ("one h100", [{"x": 1}])


def test_without_a_file_nothing_is_written() -> None:
    write(None, "pagewire bench serve", [], runs=[])


def test_a_machine_is_described_by_its_cores() -> None:
    assert re.match(r"\d+ cores, ", machine())


def test_a_wheel_has_a_version_instead_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit())
    monkeypatch.setattr(output, "CHECKOUT", tmp_path)
    assert commit().startswith("pagewire ")


def test_a_table_is_markdown_with_numbers_on_the_right() -> None:
    assert markdown("name | x", ["a | 1"]) == ["| name | x |", "| --- | ---: |", "| a | 1 |"]


def test_a_range_is_shown_where_there_is_one() -> None:
    assert spread(1.5, [1.0, 2.25]) == "1.50 (1.00–2.25)"
    assert spread(1.5, [1.5]) == spread(1.5, []) == spread(1.501, [1.499, 1.502]) == "1.50"
