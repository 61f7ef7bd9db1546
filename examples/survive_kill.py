"""Kill the executor in the middle of a stream: python examples/survive_kill.py [MODEL]

It starts a stack of its own. The supervisor starts another executor, which goes on where the first one ended.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pagewire import Client

PROMPT = "Once upon a time"
TOKENS = 200
KILL_AT = 20
"""Tokens after which the executor is killed."""


def executor_of(stack: int) -> int:
    """Returns the process id of the executor that a stack has started."""
    children = Path(f"/proc/{stack}/task/{stack}/children").read_text().split()
    return next(int(pid) for pid in children if "services.executor" in Path(f"/proc/{pid}/cmdline").read_text())


def text_of(client: Client, stack: int | None = None) -> str:
    """Returns the text of a greedy request, during which the executor of `stack` is killed."""
    text, count = "", 0
    for delta in client.stream(PROMPT, temperature=0.0, max_tokens=TOKENS, ignore_eos=True):
        text, count = text + delta.text, count + len(delta.token_ids)
        if stack is not None and count >= KILL_AT:
            os.kill(executor_of(stack), signal.SIGKILL)
            stack = None
    return text


def main() -> None:
    """Compares the text of an interrupted stream with that of an undisturbed one."""
    command = [sys.executable, "-m", "pagewire", "serve", *sys.argv[1:], "--port", "0", "--nats-port", "0"]
    command += ["--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stack:
        assert stack.stdout is not None
        _, _, nats_url = stack.stdout.readline().split()
        with Client(nats_url) as client:
            undisturbed, interrupted = text_of(client), text_of(client, stack.pid)
        stack.terminate()
    print(f"the texts are equal: {undisturbed == interrupted}")


if __name__ == "__main__":
    main()
