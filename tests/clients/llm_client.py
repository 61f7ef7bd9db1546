"""Chats with Simon Willison's command `llm`: python tests/clients/llm_client.py URL."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LLM = Path(sys.executable).with_name("llm")
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
MODELS = """
- model_id: pagewire
  model_name: smollm2-135m-instruct
  api_base: "{url}/v1"
"""


def main(url: str) -> None:
    """Raises AssertionError when an answer is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(url=url))
        whole, streamed = ask(folder, "--no-stream"), ask(folder)
        logged = json.loads(run(folder, "logs", "list", "--json").stdout)
    assert whole[0] == ANSWER, whole
    assert whole[0] == streamed[0], (whole, streamed)
    used = {(entry["input_tokens"], entry["output_tokens"]) for entry in logged}
    assert len(logged) == 2, logged
    ((prompt_tokens, output_tokens),) = used
    assert prompt_tokens > 0 < output_tokens, used
    for _, usage in (whole, streamed):  # a later one may also tell how much of its prompt was cached
        assert f"{prompt_tokens} input, {output_tokens} output" in usage, (whole, streamed, used)


def ask(folder: str, *flags: str) -> tuple[str, str]:
    """Returns the answer, and the line that tells its usage."""
    options = ("-m", "pagewire", "--usage", "-o", "temperature", "0", "-o", "max_tokens", "24")
    done = run(folder, *options, *flags, QUESTION)
    return done.stdout.rstrip("\n"), done.stderr.strip()


def run(folder: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command with its settings and its log in a folder."""
    done = subprocess.run(
        [LLM, *arguments],
        env=os.environ | {"LLM_USER_PATH": folder},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"llm {' '.join(arguments)}: {done.stderr}"
    return done


if __name__ == "__main__":
    main(sys.argv[1])
    print("prompt, prompt stream, usage in the log")
