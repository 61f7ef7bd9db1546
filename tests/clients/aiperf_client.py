"""Runs `aiperf profile` over four routes: python tests/clients/aiperf_client.py URL TOKENIZER.

TOKENIZER is a folder with the model's tokenizer in the Hugging Face format.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("aiperf")
MODEL = "smollm2-135m-instruct"
ENDPOINTS = ("chat", "completions", "responses", "messages")
REQUESTS, CONCURRENCY = 32, 8
INPUT, OUTPUT = 64, 16
"""Tokens of a request; a chat template adds some to the input."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
"""Offline, it takes the folder of a tokenizer for the name of one."""


def main(url: str, tokenizer: str) -> str:
    """Returns what was run. Raises AssertionError when a request failed or a count is wrong."""
    for endpoint in ENDPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            command = f"""
                {COMMAND} profile --model {MODEL} --url {url} --endpoint-type {endpoint} --streaming
                --tokenizer {tokenizer} --request-count {REQUESTS} --concurrency {CONCURRENCY}
                --prompt-input-tokens-mean {INPUT} --prompt-output-tokens-mean {OUTPUT} --random-seed 1
                --output-artifact-dir {folder} --ui none
            """
            done = subprocess.run(
                command.split(), env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
            )
            exports = list(Path(folder).rglob("profile_export_aiperf.json"))
            assert exports, f"{endpoint}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
            figures = json.loads(exports[0].read_text())
        assert figures["request_count"]["avg"] == REQUESTS, figures["request_count"]
        assert not figures.get("error_summary"), figures["error_summary"]
    return f"--endpoint-type {', '.join(ENDPOINTS)}: {REQUESTS} requests, {CONCURRENCY} at a time, 0 failed"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
