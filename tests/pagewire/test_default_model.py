"""The default model, SmolLM2-135M-Instruct, from the package index."""

import re
import subprocess
import sys

from pagewire import LLM, Client, SamplingParams
from pagewire.client.async_client import Messages
from pagewire.shared.models.model_folder import eos_ids, read_config
from tests.pagewire.serving import run, serving
from tests.support.default_model import default_model
from tests.support.processes import free_port

QUESTIONS = (
    "What is the capital of France?",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Name the largest planet.",
)
LOAD = """
import sys
from pathlib import Path
import gguf, torch
from pagewire.services.executor.models.registry import load_model
from pagewire import Client, SamplingParams
from pagewire.shared.models.model_folder import read_config
def status(key):
    return int(Path("/proc/self/status").read_text().partition(key + ":")[2].split()[0]) << 10
before = status("VmRSS")
model = load_model(Path(sys.argv[1]), read_config(Path(sys.argv[1])), "bfloat16")
print(status("VmHWM") - before, sum(value.nbytes for value in model.parameters()))
"""


def test_the_default_model_answers_a_question() -> None:
    default_model()
    port = str(free_port())  # any stack of this machine may have the default port, and would be asked
    done = run("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "2", "--nats-port", port)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr


def test_the_default_model_chats() -> None:
    default_model()
    with serving("--max-model-len", "512", "--num-kv-blocks", "64") as served, Client(served.nats) as client:
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        result = client.generate(messages=question, sampling=SamplingParams(max_tokens=40, temperature=0.0))
        (info,) = client.models()
    assert info.name == "smollm2-135m-instruct"
    assert result.choices[0].finish_reason == "stop"
    assert result.choices[0].text == "The capital of Japan is Tokyo."


def test_the_default_model_answers_as_in_float32() -> None:
    """Its weights are integers by default, and the inputs of their products are rounded."""
    default_model()
    served = answers()
    assert served[0] == "The capital of France is Paris."
    assert served == answers(dtype="float32", quantization="none")


def answers(**settings: str) -> list[str]:
    conversations: list[Messages] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM("smollm2-135m-instruct", device="cpu", max_model_len=512, num_kv_blocks=128, **settings) as llm:
        results = llm.chat(conversations, SamplingParams(max_tokens=24, temperature=0.0))
    return [result.outputs[0].text for result in results]


def test_the_default_model_ends_where_llama_cpp_ends() -> None:
    path = default_model()
    assert eos_ids(path) == {0, 2, 4}, "<|endoftext|>, <|im_end|>, <reponame>"
    assert read_config(path)["max_position_embeddings"] == 8192


def test_loading_the_default_model_takes_little_more_memory_than_its_weights() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD, default_model()], capture_output=True, text=True, check=True)
    peak, final = map(int, done.stdout.split())
    assert final > 250 << 20
    assert peak < 1.3 * final


def test_commands_list_the_default_model() -> None:
    path = default_model()
    assert run("pull", "smollm2-135m-instruct").stdout.strip() == str(path)
    listed = run("models").stdout.splitlines()
    assert any(re.match(r"smollm2-135m-instruct +98 MB +here .*\(default\)", line) for line in listed)
    assert any(line.startswith("bundled") for line in listed)
    refused = run("models", "--remove", "nothing")
    assert refused.returncode == 2
    assert "there is no fetched model nothing; fetched models: smollm2-135m-instruct" in refused.stderr
