"""Where a benchmark may write, known before it has measured for minutes."""

from argparse import ArgumentTypeError
from pathlib import Path


def json_file(text: str) -> Path:
    """A file to be written.

    Raises:
        ArgumentTypeError: it is a folder, or would lie in none.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    return path


def folder(text: str) -> Path:
    """A folder, which may be yet to be made.

    Raises:
        ArgumentTypeError: it is a file.
    """
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"{path} is a file: name a folder")
    return path
