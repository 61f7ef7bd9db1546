"""Downloads a model from the hub, in a process of its own: the hub's library cannot be stopped.

The process prints one line of JSON, and the progress on standard error.
"""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.fetch import POLL_INTERVAL, FetchStopped

WEIGHTS = "*.safetensors"
"""Pattern of the files with weights."""
COPIES = ("consolidated*.safetensors", f"*/{WEIGHTS}")
"""Patterns of files with the same weights in another publisher's format."""
_DOWNLOADED = ("*.json", WEIGHTS, "*.jinja", "*.model")


class Downloaded(msgspec.Struct):
    """The result of a download."""

    path: str = ""
    """Folder of the model; empty: the hub does not give it."""
    reason: str = ""
    """Why it does not, in one line."""


def download(model: str, revision: str, *, weights: bool, stop: threading.Event | None = None) -> Path:
    """Returns the folder of a model of the hub, which is downloaded if it is not in the cache.

    Args:
        model: id of the model.
        revision: branch, tag or commit; "": the newest.
        weights: whether the weights are downloaded, too.
        stop: stops the download when it is set.

    Raises:
        ConfigurationError: the hub does not give the model, or its library has failed; the message says why.
        FetchStopped: `stop` was set.
    """
    stop = stop or threading.Event()
    command = [sys.executable, "-P", "-m", __name__, model, revision, "weights" if weights else ""]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            while process.poll() is None:
                if stop.wait(POLL_INTERVAL):
                    raise FetchStopped(f"the download of {model} was stopped")
        finally:
            process.kill()
        output = b"" if process.stdout is None else process.stdout.read()
    try:
        result = msgspec.json.decode(output.splitlines()[-1] if output else b"", type=Downloaded)
    except msgspec.DecodeError:
        result = Downloaded(reason=f"the download has ended with code {process.returncode}")
    if not result.path:
        raise ConfigurationError(
            f"there is no folder or short name {model}, and the hub does not give a model of that id: {result.reason}"
        )
    return Path(result.path)


def snapshot(model: str, revision: str, *, weights: bool) -> Downloaded:
    """Downloads a model in this process."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # base class of its connection errors

    patterns = [pattern for pattern in _DOWNLOADED if weights or pattern != WEIGHTS]
    try:
        path = snapshot_download(
            model, revision=revision or None, allow_patterns=patterns, ignore_patterns=list(COPIES)
        )
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Downloaded(reason=reason[0])
    return Downloaded(path)


if __name__ == "__main__":
    result = snapshot(sys.argv[1], sys.argv[2], weights=bool(sys.argv[3]))
    print(msgspec.json.encode(result).decode())
