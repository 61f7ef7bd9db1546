"""vLLM's offline examples run with only the imports changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

FOLDER = Path(__file__).parent
SHOWN = {
    "basic": "Prompt:    'The capital of France is'",
    "chat": "Generated text: ",
    "logprobs": "cumulative: -",
    "beam_search": "The capital of France is",
    "prefix_caching": "Generated answers are the same: True",
}


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "bundled"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
