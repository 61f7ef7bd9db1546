"""Runs `vllm bench serve` over chats and completions: python tests/clients/vllm_cpu_client.py URL TOKENIZER.

TOKENIZER is a folder with the model's tokenizer in the Hugging Face format.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = Path(sys.executable).with_name("vllm")
ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
"""By backend."""
REQUESTS, CONCURRENCY = 200, 64
INPUT, OUTPUT = 64, 32
"""Tokens of a request; a chat template adds some to the input."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(url: str, tokenizer: str) -> None:
    """Raises AssertionError when a request failed or a count is wrong."""
    for backend, endpoint in ENDPOINTS.items():
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = f"""
                {VLLM} bench serve --backend {backend} --base-url {url} --endpoint {endpoint} --tokenizer {tokenizer}
                --dataset-name random --random-input-len {INPUT} --random-output-len {OUTPUT} --ignore-eos
                --num-prompts {REQUESTS} --max-concurrency {CONCURRENCY} --temperature 0 --disable-tqdm
                --save-result --save-detailed --result-filename {result}
            """
            done = subprocess.run(
                command.split(), env=os.environ | QUIET, capture_output=True, text=True, timeout=600, check=False
            )
            assert result.exists(), f"{backend}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
            figures = json.loads(result.read_text())
        table = re.search(r"=+ Serving Benchmark Result =+.*?={20,}", done.stdout, re.DOTALL)
        assert table, done.stdout
        print(f"--backend {backend}", table[0], sep="\n", file=sys.stderr)
        assert (figures["completed"], figures["failed"]) == (REQUESTS, 0), set(figures["errors"])
        assert figures["total_output_tokens"] == REQUESTS * OUTPUT, figures["total_output_tokens"]
        assert figures["total_input_tokens"] >= REQUESTS * INPUT, figures["total_input_tokens"]
        assert all(figures["generated_texts"]), f"{backend}: an answer is empty"


if __name__ == "__main__":
    main(*sys.argv[1:])
    print(f"--backend {' and '.join(ENDPOINTS)}: {REQUESTS} requests, {CONCURRENCY} at a time, 0 failed")
