"""Writes tables in Markdown, and raw results in JSON files that name their origin."""

import json
import os
import platform
import shlex
import subprocess
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that holds `bench/`; of an installed wheel, the package's own."""


def add_output(parser: ArgumentParser) -> None:
    """Declares `--output`, which is checked before the benchmark measures anything."""
    parser.add_argument("--output", type=json_file, help="JSON file for the raw results")


def json_file(text: str) -> Path:
    """Returns the path of a file that can be written.

    Raises:
        ArgumentTypeError: the path is a folder, or its folder does not exist.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    return path


def write(file: Path | None, program: str, arguments: Sequence[str], **figures: Any) -> None:
    """Writes `figures` below a header with the command (`program` is its first words), machine, commit and date.

    Without a file, nothing is written.
    """
    if file is None:
        return
    header = {
        "command": " ".join([program, *map(shlex.quote, arguments)]),
        "machine": machine(),
        "commit": commit(),
        "date": today(),
    }
    file.write_text(json.dumps(header | figures, indent=1) + "\n")


def machine() -> str:
    """Returns the cores that this process may use, the model of the CPU and the GPU, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {gpu}"


def commit() -> str:
    """Returns the commit of the checkout, marked if files differ from it; of an installed wheel, its version."""
    if not (CHECKOUT / ".git").exists():
        return f"pagewire {version('pagewire')}"
    described = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


def today() -> str:
    """Returns the date in UTC, like 2026-01-31."""
    return datetime.now(UTC).date().isoformat()


def markdown(header: str, rows: Iterable[str]) -> list[str]:
    """Returns the lines of a table whose cells are separated by ` | `. All columns but the first are numbers."""
    rule = "---" + " | ---:" * header.count("|")
    return [f"| {line} |" for line in (header, rule, *rows)]


def spread(value: float, samples: Sequence[float]) -> str:
    """Returns a ratio, and behind it the range of the samples where that is more than a number."""
    lowest, highest = (f"{bound(samples, default=value):.2f}" for bound in (min, max))
    return f"{value:.2f}" + (f" ({lowest}–{highest})" if lowest != highest else "")
