"""The clients that are among the development requirements, against the default model; `make test-clients` runs all."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.clients.__main__ import AIPERF, GUIDELLM, REQUIREMENTS, SCHEMATHESIS, SCRIPTS
from tests.clients.scripted_clients import CLAUDE_CODE, CODEX, VERCEL
from tests.clients.scripted_clients import REQUIREMENTS as SCRIPTED
from tests.pagewire.serving import Served, serving
from tests.support.default_model import default_model
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    default_model()
    with serving("--max-model-len", "512", "--num-kv-blocks", "64") as served:
        yield served


@pytest.mark.parametrize("script", ["openai_client.py", "litellm_client.py", "llm_client.py"])
def test_a_client_gets_the_right_answers(stack: Served, script: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, stack.http],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_script_that_gets_a_wrong_answer_fails(stack: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import openai_client as c; c.ANSWER = 'Rome'; c.main('" + stack.http + "')"],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_the_page_names_every_version() -> None:
    page = (SCRIPTS.parents[1] / "docs" / "clients.md").read_text()
    for requirement in (*REQUIREMENTS, *SCRIPTED, GUIDELLM, AIPERF, SCHEMATHESIS):
        package, _, version = requirement.partition("==")
        assert f"| {package.partition('[')[0]} | {version} |" in page
    for package in (CODEX, CLAUDE_CODE, VERCEL[0]):
        assert f"| {package.rpartition('@')[2]} |" in page
