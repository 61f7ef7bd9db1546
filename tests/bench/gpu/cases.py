"""A machine without a GPU, and a model so small that the interpreter runs it."""

from typing import Any

import torch

from pagewire.bench._gpu.machine import Machine
from tests.support.host_runtime import HostRuntime

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MACHINE = Machine(HostRuntime(), torch.float32, room=1 << 20, bandwidth=1e9, rate=1e9)
"""Its rates are made up."""
