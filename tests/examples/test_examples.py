"""The scripts in `examples/` run as a user would run them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.shared.models.model_folder import BUNDLED
from tests.pagewire.serving import Served, serving
from tests.support.adapters import write_adapter

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "tests" / "data" / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
"""A chat template that shows tools, which the one of the bundled model does not."""
BESIDE_A_STACK = {
    "adapters_http": "sql is an adapter of bundled: ",
    "chat_http": "",
    "nats_request": "",
    "stream": "\ncancelled after ",
    "structured_output": ", ",
    "tool_calls": "temperature(",
    "two_replicas": " has sampled ",
    "tokenize_text": "the text is the same: True",
}
"""Part of the output, by script: these scripts need a running stack."""
ALONE = {
    "adapters_offline": "adapter-1: 'The house by the sea' goes on: ",
    "offline_batch": "'The house by the sea' goes on: ",
    "logprobs": "beam -",
    "survive_kill": "the texts are equal: True",
}
"""Part of the output, by script: these scripts start a stack of their own."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter of the bundled model."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", BUNDLED)


@pytest.fixture(scope="module")
def stack(adapter: Path) -> Iterator[Served]:
    """A stack with two replicas of the bundled model."""
    flags: tuple[str, ...] = (
        "--data-parallel-size",
        "2",
        "--enable-auto-tool-choice",
        "--chat-template",
        str(TEMPLATE),
    )
    flags += ("--enable-lora", "--lora-modules", f"sql={adapter}")
    with serving("--model", "bundled", *flags) as served:
        yield served


@pytest.mark.parametrize("name", BESIDE_A_STACK)
def test_a_script_beside_a_stack_prints_its_result(name: str, stack: Served) -> None:
    output = _run(name, PAGEWIRE_NATS_URL=stack.nats, OPENAI_BASE_URL=f"{stack.http}/v1")
    assert output.strip()
    assert BESIDE_A_STACK[name] in output


@pytest.mark.parametrize("name", ALONE)
def test_a_script_with_a_stack_of_its_own_prints_its_result(name: str, adapter: Path) -> None:
    arguments = [str(BUNDLED), str(adapter)] if name == "adapters_offline" else ["bundled"]
    assert ALONE[name] in _run(name, *arguments)


def test_every_script_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == BESIDE_A_STACK.keys() | ALONE.keys()


def _run(name: str, *arguments: str, **environ: str) -> str:
    script = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    return script.stdout
