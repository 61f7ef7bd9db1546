"""Compiles the CPU kernels once for the machine that runs them, and loads them.

The library is stored in the user's cache folder. Its name is a digest of everything that it depends on, so that it is
never stale.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from pagewire.shared.errors import PagewireError
from pagewire.shared.progress import shown
from pagewire.shared.sampling import RECORD

COMPILER = "c++"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread", "-Wno-psabi")
WITHIN = 300.0
"""Timeout of the compiler, in seconds."""
KEPT = 8
"""Maximum number of libraries in the cache folder, the last loaded ones."""
SOURCES = Path(__file__).parent
_C_TYPES = {"<f8": "double", "<i8": "int64_t", "<u8": "uint64_t"}
_CPUINFO = Path("/proc/cpuinfo")


class NotBuilt(PagewireError):
    """The library cannot be built or loaded, for the reason in the message."""


def cache_folder() -> Path:
    """Returns the folder of compiled libraries, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / "kernels"


def load(sources: Path = SOURCES, cache: Path | None = None) -> ctypes.CDLL:
    """Returns the library of all .cpp files in `sources`, from the cache if possible.

    Raises:
        NotBuilt: there is no compiler, the compiler failed, or its result cannot be loaded.
    """
    try:
        folder = cache or cache_folder()
        library = folder / f"{_digest(sources)}.so"
        if library.exists() and (found := _open(library)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            built = _compile(sources, Path(draft))
            loaded = ctypes.CDLL(str(built))
            built.rename(library)  # atomic: another process never sees half a library
        with suppress(OSError):  # another process may delete files at the same time
            _tidy(folder)
        return loaded
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{COMPILER} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{COMPILER} did not end within {WITHIN:.0f} s") from error
    except (OSError, RuntimeError) as error:
        raise NotBuilt(str(error)) from error


def record_header() -> str:
    """Returns `sampling_record.hpp`, which the sources include: a record of `pagewire.shared.sampling` as a struct."""
    fields = "".join(f"    {_C_TYPES[RECORD[name].str]} {name};\n" for name in RECORD.names or ())
    size = f"static_assert(sizeof(SamplingRecord) == {RECORD.itemsize});\n"
    return "#pragma once\n#include <cstdint>\n\nstruct SamplingRecord {\n" + fields + "};\n" + size


def _open(library: Path) -> ctypes.CDLL | None:
    """Loads the library; returns None if the file is not a library, for example after a full disk."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    with suppress(OSError):  # a shared folder may be read-only
        library.touch()
    return loaded


def _tidy(folder: Path) -> None:
    """Deletes libraries of old versions. Processes that have loaded one are not affected."""
    last_loaded = sorted(folder.glob("*.so"), key=lambda library: library.stat().st_mtime)
    for library in last_loaded[:-KEPT]:
        library.unlink(missing_ok=True)


def _digest(sources: Path) -> str:
    """Returns the digest of the sources, written and generated, the compiler, its flags and the CPU's flags."""
    digest = hashlib.sha256()
    for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.hpp")]):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(record_header().encode())
    digest.update(_run(COMPILER, "--version").encode() + " ".join(FLAGS).encode() + _cpu().encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """Returns the CPU's description, on which -march=native depends."""
    if not _CPUINFO.exists():
        return platform.machine() + platform.processor()
    lines = _CPUINFO.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(sources: Path, folder: Path) -> Path:
    """Compiles the files in parallel, because the start of the executor waits for them, and returns the library."""
    objects = {file: str(folder / f"{file.stem}.o") for file in sorted(sources.glob("*.cpp"))}
    (folder / "sampling_record.hpp").write_text(record_header())
    commands = [[COMPILER, *FLAGS, f"-I{folder}", "-c", str(file), "-o", made] for file, made in objects.items()]
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        for process in shown(running, "compiling the CPU kernels"):
            _, errors = process.communicate(timeout=WITHIN)
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
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN, check=True
    ).stdout
