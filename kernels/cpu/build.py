"""Compiles the CPU kernels once for the machine that runs them, and loads them.

The library is stored in the user's cache folder. Its name is a digest of everything that it depends on, so that it is
never stale. Where there is no compiler, as in an image or beside a wheel, libraries for several
classes of machines lie beside the sources.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from pagewire.kernels.cpu.targets import Target, best_target
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.progress import shown
from pagewire.shared.sampling_parameters import RECORD

COMPILER = "c++"
NATIVE = "-march=native"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fPIC", "-pthread", "-Wno-psabi")
COMPILER_TIMEOUT = 300.0
"""Seconds after which a run of the compiler counts as stuck."""
MAX_CACHED = 8
"""Maximum number of libraries in the cache folder, the last loaded ones."""
SOURCES = Path(__file__).parent / "cpp"
AHEAD = "ahead"
"""Folder beside the sources, with the libraries that `build_ahead` has compiled."""
_C_TYPES = {"<f8": "double", "<i8": "int64_t", "<u8": "uint64_t"}
_CPUINFO = Path("/proc/cpuinfo")
_FAILURES = (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError, RuntimeError)


class NotBuilt(ConfigurationError):
    """The library cannot be built or loaded. The message says why, and how to get one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the CPU kernels are not compiled: {reason}. Install a C++ compiler (Debian's package g++), or a wheel of"
            " Pagewire that holds them (make wheel)"
        )


def cache_folder() -> Path:
    """Returns the folder of compiled libraries, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "kernels"


def load(sources: Path = SOURCES, cache: Path | None = None) -> ctypes.CDLL:
    """Returns the library of all .cpp files in `sources`, compiled ahead or from the cache if possible.

    Raises:
        NotBuilt: there is no compiler, the compiler failed, or its result cannot be loaded.
    """
    target = best_target(platform.machine(), cpu_features())
    if target is not None and (ready := _open(_ahead(sources, target))) is not None:
        return ready
    try:
        folder = cache or cache_folder()
        library = folder / f"{_digest(sources, _run(COMPILER, '--version'), *FLAGS, _cpu())}.so"
        if (ready := _open(library)) is not None:
            return ready
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder), tempfile.TemporaryDirectory(dir=folder) as draft:
            if (ready := _open(library)) is not None:  # another process has compiled it meanwhile
                return ready
            built = _compile(sources, Path(draft), FLAGS)
            loaded = ctypes.CDLL(str(built))
            built.rename(library)  # atomic: another process never sees half a library
        with suppress(OSError):  # another process may delete files at the same time
            _tidy(folder)
        return loaded
    except _FAILURES as error:
        raise _not_built(error) from error


def build_ahead(sources: Path, targets: Sequence[Target]) -> list[Path]:
    """Compiles a library for each class of machines, beside the sources, and returns them.

    Raises:
        NotBuilt: there is no compiler, or it failed.
    """
    folder = sources / AHEAD
    built = {_ahead(sources, target): _flags(target) for target in targets}
    try:
        folder.mkdir(exist_ok=True)
        for library, flags in built.items():
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                _compile(sources, Path(draft), flags).rename(library)
    except _FAILURES as error:
        raise _not_built(error) from error
    return list(built)


def record_header() -> str:
    """Returns `sampling_record.hpp`, which the sources include: `sampling_parameters.RECORD` as a struct."""
    fields = "".join(f"    {_C_TYPES[RECORD[name].str]} {name};\n" for name in RECORD.names or ())
    size = f"static_assert(sizeof(SamplingRecord) == {RECORD.itemsize});\n"
    return "#pragma once\n#include <cstdint>\n\nstruct SamplingRecord {\n" + fields + "};\n" + size


def _not_built(error: Exception) -> NotBuilt:
    match error:
        case subprocess.CalledProcessError():
            return NotBuilt(f"{COMPILER} failed: {error.stderr.strip()[-500:]}")
        case subprocess.TimeoutExpired():
            return NotBuilt(f"{COMPILER} did not end within {COMPILER_TIMEOUT:.0f} s")
        case _:
            return NotBuilt(str(error))


def _flags(target: Target) -> tuple[str, ...]:
    return tuple(chain.from_iterable(target.flags if flag == NATIVE else (flag,) for flag in FLAGS))


def _ahead(sources: Path, target: Target) -> Path:
    """Returns the file of a library that is compiled ahead; its compiler may be one that is not there any more."""
    return sources / AHEAD / f"{target.name}-{_digest(sources, *_flags(target))}.so"


def _open(library: Path) -> ctypes.CDLL | None:
    """Loads the library; returns None if there is none, or the file is none, for example after a full disk."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    with suppress(OSError):  # a shared folder may be read-only
        library.touch()
    return loaded


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile: executors that start together would compile the same side by side.

    The lock ends with the process that holds it. On a file system without locks all of them compile.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tidy(folder: Path) -> None:
    """Deletes libraries of old versions. Processes that have loaded one are not affected."""
    last_loaded = sorted(folder.glob("*.so"), key=lambda library: library.stat().st_mtime)
    for library in last_loaded[:-MAX_CACHED]:
        library.unlink(missing_ok=True)


def _digest(sources: Path, *conditions: str) -> str:
    """Returns the digest of the sources, written and generated, and of what else the library depends on."""
    digest = hashlib.sha256()
    for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.hpp")]):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(record_header().encode())
    digest.update("\0".join(conditions).encode())
    return digest.hexdigest()[:32]


def cpu_features() -> frozenset[str]:
    """Returns the features of this machine's CPU, as /proc/cpuinfo names them."""
    return frozenset(_cpu().split())


def _cpu() -> str:
    """Returns the CPU's description, on which -march=native depends."""
    if not _CPUINFO.exists():
        return platform.machine() + platform.processor()
    lines = _CPUINFO.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(sources: Path, folder: Path, flags: tuple[str, ...]) -> Path:
    """Compiles the files in parallel, because the start of the executor waits for them, and returns the library."""
    objects = {file: str(folder / f"{file.stem}.o") for file in sorted(sources.glob("*.cpp"))}
    (folder / "sampling_record.hpp").write_text(record_header())
    commands = [
        [COMPILER, *flags, f"-I{folder}", "-c", str(file), "-o", compiled] for file, compiled in objects.items()
    ]
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        for process in shown(running, "compiling the CPU kernels"):
            _, errors = process.communicate(timeout=COMPILER_TIMEOUT)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)
    finally:
        for process in running:
            process.kill()
            process.wait()
    library = folder / "kernels.so"
    _run(COMPILER, "-shared", "-pthread", *objects.values(), "-o", str(library))
    return library


def _run(*command: str) -> str:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILER_TIMEOUT, check=True
    ).stdout
