"""Chats by curl with HTTP/1.0 and an offer of HTTP/2: python tests/clients/scripted/curl_client.py URL."""

import json
import subprocess
import sys

from features import GREETING, GREETS, MODEL, run_all


def ask(url: str, flag: str) -> None:
    """An answer, whole and streamed."""
    for stream in (False, True):
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": GREETS}], "stream": stream})
        command = ["curl", "-sS", "--fail-with-body", flag, "--json", body, f"{url}/v1/chat/completions"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        assert GREETING in answer, answer


if __name__ == "__main__":
    sys.exit(run_all({flag: lambda url, flag=flag: ask(url, flag) for flag in ("--http1.0", "--http2")}))
