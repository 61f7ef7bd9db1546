"""The commands and examples of README.md work as they are written, against a stack with the default model."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pagewire.serving import COMMAND, Served, serving
from tests.support.default_model import default_model
from tests.support.waiting import PATIENCE

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    default_model()
    with serving("--max-model-len", "1024", "--num-kv-blocks", "256") as served:
        yield served


def environment(stack: Served) -> dict[str, str]:
    """Leads `Client()` and the commands to the stack, whose ports are not the default ones."""
    return {**os.environ, "PAGEWIRE_NATS_URL": stack.nats, "PAGEWIRE_MAX_MODEL_LEN": "1024"}


def test_the_two_commands_are_targets() -> None:
    named = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(f"\n{name}: " in MAKEFILE for name in named)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_readme_runs(command: list[str], stack: Served) -> None:
    name, *arguments = command
    assert name == "pagewire"
    if arguments == ["serve"]:
        return  # the fixture serves
    run = subprocess.run(
        [*COMMAND, *arguments],
        env=environment(stack),
        input="What is the capital of Japan?",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split()[1])
def test_an_example_of_the_readme_runs(code: str, stack: Served) -> None:
    here = code.replace("http://127.0.0.1:8000", stack.http).replace("nats://127.0.0.1:4222", stack.nats)
    here = here.replace("Client()", f"Client({stack.nats!r})").replace(
        "LLM()", "LLM(num_kv_blocks=64, max_model_len=512)"
    )
    run = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_the_readme_has_examples_and_commands() -> None:
    assert len(EXAMPLES) == 3
    assert len(COMMANDS) == 4
