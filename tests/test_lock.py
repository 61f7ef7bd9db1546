"""The lock file of the image has what pyproject.toml asks for, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()
PINNED = re.findall(
    r"^([a-z0-9._-]+)==([^ ]+)(?: ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", LOCK, re.MULTILINE
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("text", PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"])
def test_every_requirement_is_pinned(text: str) -> None:
    requirement = Requirement(text)
    versions = [version for name, version, _ in PINNED if name == requirement.name]
    assert versions, f"{text} is not in the lock file: run `make lock`"
    assert all(version in requirement.specifier for version in versions), f"{text}: run `make lock`"


def test_every_line_has_hashes_and_no_line_an_address() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith(("#", " "))]
    assert len(lines) == len(PINNED)
    assert "://" not in LOCK
