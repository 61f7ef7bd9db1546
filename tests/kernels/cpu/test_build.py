"""Libraries are compiled once per source and machine, and whatever is wrong has one clear error."""

import errno
import fcntl
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.targets import targets_of

SOURCE = 'extern "C" int answer() { return 42; }\n'
LOCKS = Path("/proc/locks")
"""All locks of the machine, and with an arrow who waits for one."""
LOAD = (
    "import sys; from pathlib import Path; from pagewire.kernels.cpu import build;"
    "print(build.load(Path(sys.argv[1]), Path(sys.argv[2])).answer())"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    return folder


def start(sources: Path, cache: Path, path: str = "") -> "subprocess.Popen[str]":
    """Loads in a process of its own, which prints the answer."""
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(sources), str(cache)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(build.__file__).parents[2],
        env=os.environ | {"PATH": path + os.environ["PATH"]},
    )


def answer(process: "subprocess.Popen[str]") -> int:
    output, _ = process.communicate(timeout=60)
    return int(output)


def spy(folder: Path) -> Path:
    """A folder for the PATH with a compiler that notes how it is called."""
    folder.mkdir()
    calls = folder / "calls"
    script = folder / build.COMPILER
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nPATH="${{PATH#*:}}" exec {build.COMPILER} "$@"\n')
    script.chmod(0o755)
    return calls


def test_a_library_is_compiled_once_and_then_loaded_from_the_cache(sources: Path, tmp_path: Path) -> None:
    calls, cache = spy(tmp_path / "bin"), tmp_path / "cache"
    path = f"{calls.parent}:"
    assert answer(start(sources, cache, path)) == 42
    assert calls.read_text().count("answer.cpp") == 1
    assert answer(start(sources, cache, path)) == 42
    assert calls.read_text().count("answer.cpp") == 1
    assert [file.suffix for file in cache.iterdir()] == [".so"]


def test_another_source_is_another_library(sources: Path, tmp_path: Path) -> None:
    assert build.load(sources, tmp_path).answer() == 42
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    assert build.load(sources, tmp_path).answer() == 43
    (sources / "unused.hpp").write_text("")
    assert build.load(sources, tmp_path).answer() == 43
    assert len(list(tmp_path.glob("*.so"))) == 3


def test_the_library_loaded_longest_ago_is_removed_first(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def load(number: int) -> Path:
        """The library of a version; whatever is loaded next is loaded a day later."""
        (sources / "answer.cpp").write_text(SOURCE.replace("42", str(number)))
        assert build.load(sources, cache).answer() == number
        libraries = sorted(cache.glob("*.so"), key=lambda library: library.stat().st_mtime)
        for library in libraries:
            loaded = library.stat().st_mtime - 86400
            os.utime(library, (loaded, loaded))
        return libraries[-1]

    compiled = [load(number) for number in range(build.MAX_CACHED)]
    assert load(0) == compiled[0]
    new = load(build.MAX_CACHED)
    assert set(cache.glob("*.so")) == {new, *compiled} - {compiled[1]}


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(100)])
def test_a_broken_file_in_the_cache_is_built_again(sources: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "cache"
    assert answer(start(sources, cache)) == 42
    (library,) = cache.iterdir()
    library.write_bytes(content)
    assert build.load(sources, cache).answer() == 42
    assert answer(start(sources, cache)) == 42


def test_processes_that_start_together_compile_once(sources: Path, tmp_path: Path) -> None:
    calls, cache, go = spy(tmp_path / "bin"), tmp_path / "cache", tmp_path / "go"
    compiler = calls.parent / build.COMPILER
    slow = f'case "$*" in *answer.cpp*) until test -e {go}; do sleep 0.01; done;; esac\nPATH='
    compiler.write_text(compiler.read_text().replace("PATH=", slow))
    processes = [start(sources, cache, f"{calls.parent}:") for _ in range(3)]
    pids = {str(process.pid) for process in processes}

    def compiling() -> int:
        return calls.read_text().count("answer.cpp") if calls.exists() else 0

    def waiting() -> int:
        return sum("->" in fields and fields[5] in pids for fields in map(str.split, LOCKS.read_text().splitlines()))

    while compiling() + waiting() < len(processes):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    go.touch()
    assert [answer(process) for process in processes] == [42] * 3
    assert [file.suffix for file in cache.iterdir()] == [".so"]
    assert compiling() == 1


def test_where_nothing_can_be_locked_a_library_is_compiled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.load(sources, tmp_path / "cache").answer() == 42


def test_a_missing_compiler_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NotBuilt, match=r"c\+\+"):
        build.load(sources, tmp_path / "cache")


def test_a_library_compiled_ahead_needs_no_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = targets_of(platform.machine())
    assert len(build.build_ahead(sources, targets)) == len(targets)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.load(sources, tmp_path / "cache").answer() == 42
    assert not (tmp_path / "cache").exists()


def test_a_library_compiled_ahead_of_a_change_is_not_loaded(sources: Path, tmp_path: Path) -> None:
    build.build_ahead(sources, targets_of(platform.machine()))
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    assert build.load(sources, tmp_path / "cache").answer() == 43


def test_a_source_that_does_not_compile_is_an_error(sources: Path, tmp_path: Path) -> None:
    (sources / "wrong.cpp").write_text("int f() { return missing; }\n")
    with pytest.raises(build.NotBuilt, match="missing"):
        build.load(sources, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_library_that_does_not_load_is_an_error(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text('extern "C" int nowhere();\nextern "C" int answer() { return nowhere(); }\n')
    with pytest.raises(build.NotBuilt, match="nowhere"):
        build.load(sources, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_an_error(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(build.NotBuilt, match="cache"):
        build.load(sources, tmp_path / "cache")


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "pagewire" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert build.cache_folder() == Path("/home/somebody/.cache/pagewire/kernels")
