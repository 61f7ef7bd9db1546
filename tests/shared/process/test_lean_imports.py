"""A service process leaves out what its libraries import for others."""

import subprocess
import sys

import pytest

from pagewire.shared.process.lean_imports import UNUSED


@pytest.mark.parametrize("service", ["detokenizer", "gateway", "scheduler", "tokenizer"])
def test_a_service_starts_without_the_packages_that_it_does_not_use(service: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", f"pagewire.services.{service}", "--help"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    parents = {line.rsplit("|", 1)[-1].strip().partition(".")[0] for line in report.splitlines() if "." in line}
    assert "msgspec" in parents
    assert not parents & {*UNUSED, "torch", "transformers", "yaml"}  # a package that is not there has no submodules
