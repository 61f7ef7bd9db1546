"""The layout of the repository: words that are retired, sizes of files, and the files that the documents name."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 420
RETIRED = (
    "Attend",
    "Bulletin",
    "Departures",
    "Doorway",
    "Finisher",
    "FinishSequences",
    "Flight",
    "Flights",
    "Handover",
    "House",
    "InFlight",
    "Intake",
    "Interest",
    "Lookups",
    "Mailbox",
    "MendedClient",
    "Operators",
    "Outbox",
    "Patience",
    "Presence",
    "Pulse",
    "Ring",
    "SamplingRows",
    "Searches",
    "SlotSampling",
    "Spec",
    "Told",
    "Verbs",
    "_evict",
    "_expire",
    "_grow",
    "_leave",
    "_left",
    "_part",
    "_release",
    "_retire",
    "_vacate",
    "doorway",
    "halt",
    "hear",
    "heirs",
    "land",
    "lookups",
    "mailbox",
    "rooms",
    "seats",
    "stocked",
    "tenancies",
    "tenancy",
    "widths",
)
"""Names of earlier designs: each is replaced by a term of the field."""


def _grep(word: str, *pathspecs: str) -> list[str]:
    command = ["git", "grep", "--untracked", "-l", "-w", "-e", word, "--", *pathspecs]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in {0, 1}, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_gone(word: str) -> None:
    assert not _grep(word, "*.py", "*.cpp", "*.hpp", "*.md", ":!tests/test_layout.py")


def test_no_source_file_is_too_long() -> None:
    sources = [
        path for folder in ("bench", "kernels", "services", "shared", "tools") for path in _sources(ROOT / folder)
    ]
    sources += _sources(ROOT / "pagewire")
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert not {name: count for name, count in lines.items() if count >= MAX_LINES}


def test_every_file_of_a_recipe_exists() -> None:
    named = re.findall(r"`([A-Za-z_./<>-]+/[A-Za-z_./<>-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    assert not [name for name in named if "<" not in name and not (ROOT / name).exists()]


def test_every_file_of_the_folder_table_exists() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Folders")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) > 20
    for folders, contents in rows:
        parents = [ROOT, *(ROOT / folder for folder in re.findall(r"`([^`]+)`", folders))]
        assert all(parent.is_dir() for parent in parents), folders
        names = re.findall(r"`([a-z0-9_/]+(?:\.[a-z]+|/))`", contents)
        assert not [name for name in names if not any((parent / name).exists() for parent in parents)]


def _sources(folder: Path) -> list[Path]:
    """The source files of a folder, without following the links in `pagewire/`."""
    return [path for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".hpp"} and not path.is_symlink()]
