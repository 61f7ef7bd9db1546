"""A place that cannot be written is refused before anything is measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.bench import ablation, busy, cpu_step, fastgen, lease, pipeline, replicas, sim, vllm_cpu
from pagewire.bench._output import folder, json_file

Main = Callable[[list[str]], int]
FILES: list[Main] = [busy.main, cpu_step.main, lease.main, pipeline.main, replicas.main]
FOLDERS: list[Main] = [ablation.main, fastgen.main, sim.main]


@pytest.mark.parametrize("main", FILES)
def test_a_folder_is_no_file(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert f"{tmp_path} is a folder: name a file in it" in capsys.readouterr().err


@pytest.mark.parametrize("main", FOLDERS)
def test_a_file_is_no_folder(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        main(["--output", str(file)])
    assert f"{file} is a file: name a folder" in capsys.readouterr().err


def test_a_file_needs_a_folder_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_cpu.main(["vllm", "--output", str(tmp_path / "none" / "a.json")])
    assert "make it first" in capsys.readouterr().err


def test_what_can_be_written_is_taken(tmp_path: Path) -> None:
    assert json_file(str(tmp_path / "a.json")) == tmp_path / "a.json"
    assert json_file("a.json") == Path("a.json")
    assert folder(str(tmp_path / "new" / "one")) == tmp_path / "new" / "one"
    assert folder(str(tmp_path)) == tmp_path
