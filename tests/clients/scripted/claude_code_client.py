"""Claude Code without a terminal: python tests/clients/scripted/claude_code_client.py URL CLAUDE."""

import json
import os
import subprocess
import sys
import tempfile

from features import COMPUTED, GREETING, MODEL, RECALLED, run_all

QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
}
"""Settings that keep it from asking other hosts."""


def start(url: str, folder: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts one run, which may run commands, with settings of its own in a folder."""
    settings = {
        "HOME": folder,
        "CLAUDE_CONFIG_DIR": folder,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    }
    return subprocess.Popen(
        [sys.argv[2], "-p", *arguments, "--allowedTools", "Bash"],
        cwd=folder,
        env=os.environ | QUIET | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def execute(url: str, folder: str, *arguments: str) -> str:
    """Returns what one run prints."""
    with start(url, folder, *arguments) as process:
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    return printed.strip()


def plain(url: str) -> None:
    """An answer without a call."""
    with tempfile.TemporaryDirectory() as folder:
        assert execute(url, folder, "Hi.") == GREETING


def resumed(url: str) -> None:
    """A command that the model asks for, its result, and a second turn in another process."""
    with tempfile.TemporaryDirectory() as folder:
        assert execute(url, folder, "COMPUTE six times seven.") == COMPUTED
        assert execute(url, folder, "RECALL the result.", "--continue") == RECALLED


def turns(url: str) -> None:
    """Two turns of one process."""
    formats = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    with tempfile.TemporaryDirectory() as folder, start(url, folder, *formats) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for question, answer in (("COMPUTE six times seven.", COMPUTED), ("RECALL the result.", RECALLED)):
            message = {"type": "user", "message": {"role": "user", "content": question}}
            print(json.dumps(message), file=process.stdin, flush=True)
            events = (json.loads(line) for line in process.stdout)
            result = next(event["result"] for event in events if event["type"] == "result")
            assert result == answer, result
        process.stdin.close()


if __name__ == "__main__":
    sys.exit(
        run_all({"-p": plain, "a tool and its result, a resumed session": resumed, "two turns of one process": turns})
    )
