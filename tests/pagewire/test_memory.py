"""The memory of an executor: its weights, in the way they are stored, its KV pool, and little else."""

import shutil
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagewire import Client, SamplingParams
from tests.pagewire.serving import serving
from tests.support.checkpoints import checkpoint

pytestmark = [pytest.mark.full]

VOCABULARY, HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS, DIM = 32000, 2048, 8, 8192, 32, 8, 64
EMBEDDING = VOCABULARY * HIDDEN
MATRICES = LAYERS * HIDDEN * (2 * HEADS * DIM + 2 * KV_HEADS * DIM + 3 * INTERMEDIATE)
BLOCKS, BLOCK_SIZE = 512, 16
KV_POOL = BLOCKS * BLOCK_SIZE * 2 * LAYERS * KV_HEADS * DIM * 2
ELSE = 400e6
"""Bytes of Python, its libraries and what a step needs."""
INT8, INT4 = 1 + 4 / 32, 1 / 2 + 8 / 32
"""Bytes of a weight with its share of the float32 scale of 32 weights, and in 4 bits of their minimum."""
WEIGHTS = {
    "none": 2 * (MATRICES + EMBEDDING),
    "int8": INT8 * (MATRICES + EMBEDDING),
    "int4": INT4 * MATRICES + INT8 * EMBEDDING,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half the layers of Llama 3.2 1B and a smaller vocabulary, with random weights."""
    folder = tmp_path_factory.mktemp("model") / "half"
    shutil.copytree(checkpoint("llama"), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(folder)
    config.update(
        {
            "max_position_embeddings": 4096,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "tie_word_embeddings": True,
        }
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantization", WEIGHTS)
def test_weights_and_kv_cache_are_in_memory_once(model: Path, quantization: str) -> None:
    flags = ["--dtype", "bfloat16"] if quantization == "none" else ["--quantization", quantization]
    flags += ["--num-kv-blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
    with serving("--model", str(model), *flags) as served, Client(served.nats) as client:
        prompts = [[5 + (place + row) % 300 for place in range(200)] for row in range(2)]
        results = [client.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)) for prompt in prompts]
        resident = psutil.Process(served.service("executor")).memory_info().rss
    assert all(len(result.choices[0].token_ids) == 8 for result in results)
    expected = WEIGHTS[quantization] + KV_POOL + ELSE
    print(f"{quantization}: {resident / 1e6:.0f} MB resident, {WEIGHTS[quantization] / 1e6:.0f} MB of weights")
    assert resident < 1.1 * expected
