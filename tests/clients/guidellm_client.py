"""Runs `guidellm` over chats and completions: python tests/clients/guidellm_client.py URL TOKENIZER.

TOKENIZER is a folder with the model's tokenizer in the Hugging Face format.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("guidellm")
FORMATS = ("/v1/chat/completions", "/v1/completions")
REQUESTS, CONCURRENCY = 32, 8
INPUT, OUTPUT = 64, 16
"""Tokens of a request; a chat template adds some to the input."""


def main(url: str, tokenizer: str) -> str:
    """Returns what was run. Raises AssertionError when a request failed or a count is wrong."""
    for request_format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = f"""
                {COMMAND} run --disable-progress
                --backend kind=openai_http,target={url},request_format={request_format}
                --profile kind=concurrent,streams={CONCURRENCY} --constraint kind=max_requests,count={REQUESTS}
                --tokenizer kind=huggingface_auto,model={tokenizer}
                --data kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}
                --output kind=json,path={report}
            """
            done = subprocess.run(
                command.split(),
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert report.exists(), f"{request_format}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    return f"{' and '.join(FORMATS)}: {REQUESTS} requests, {CONCURRENCY} at a time, 0 failed"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
