"""Codex CLI without a terminal: python tests/clients/scripted/codex_client.py URL CODEX."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import COMPUTED, GREETING, RECALLED, run_all

CONFIG = """
model = "scripted"
model_provider = "pagewire"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.pagewire]
name = "Pagewire"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def execute(folder: str, *arguments: str) -> str:
    """Returns the last message of one run."""
    done = subprocess.run(
        [sys.argv[2], "exec", "--skip-git-repo-check", *arguments],
        cwd=folder,
        env=os.environ | {"CODEX_HOME": folder},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def configure(folder: str, url: str) -> None:
    """Writes the settings of a user whose provider is the server."""
    Path(folder, "config.toml").write_text(CONFIG.format(url=url))


def session(url: str) -> None:
    """A command that the model asks for, its result, and two more turns of the session, each in another process."""
    with tempfile.TemporaryDirectory() as folder:
        configure(folder, url)
        assert execute(folder, "COMPUTE six times seven.") == COMPUTED
        assert execute(folder, "resume", "--last", "RECALL the result.") == RECALLED
        assert execute(folder, "resume", "--last", "COMPUTE it again.") == COMPUTED


def plain(url: str) -> None:
    """An answer without a call."""
    with tempfile.TemporaryDirectory() as folder:
        configure(folder, url)
        assert execute(folder, "Hi.") == GREETING


if __name__ == "__main__":
    sys.exit(run_all({"exec": plain, "a tool and its result, two turns, a resumed session": session}))
