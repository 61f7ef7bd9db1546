"""PEFT folders with random adapters, and the models into whose weights they are merged by hand."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.checkpoints import reference_model
from tests.support.gguf_files import gguf_name, permute

PREFIX = "base_model.model."
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILY_TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt-neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen3-moe": TARGETS[:4],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}
"""Names of the products of a family, where they are not `TARGETS`."""
Shape = Callable[[str], tuple[int, float]]
"""Rank and scale of the update of a module."""


def products(folder: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each module of a checkpoint whose last name is in `targets`."""
    sizes = {}
    for name, module in reference_model(folder).named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in targets and isinstance(weight, Tensor) and weight.dim() == 2:
            inputs_first = not isinstance(module, nn.Linear)  # Conv1D of GPT-2
            outputs, inputs = reversed(weight.shape) if inputs_first else weight.shape
            sizes[name] = (outputs, inputs)
    return sizes


def tensors_of(folder: Path, targets: Sequence[str], shape: Shape, seed: int) -> dict[str, Tensor]:
    """Random factors of every product of a checkpoint in `targets`, by their names in PEFT's files."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in products(folder, targets).items():
        rank, _ = shape(name)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * rank**-0.5
    return tensors


def write_adapter(
    path: Path,
    folder: Path,
    *,
    rank: int = 8,
    alpha: float = 8.0,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    shape: Shape | None = None,
    **config: Any,
) -> Path:
    """Writes an adapter of a checkpoint `folder`. `shape` must say what `rank`, `alpha` and `config` mean."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(folder, targets, shape or (lambda _: (rank, 0.0)), seed), path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    return path


def merged(folder: Path, targets: Sequence[str], shape: Shape, seed: int) -> Any:
    """The checkpoint in transformers with the adapter that `tensors_of` gives, merged into its weights."""
    model = copy.deepcopy(reference_model(folder))
    tensors = tensors_of(folder, targets, shape, seed)
    with torch.no_grad():
        for name in products(folder, targets):
            module, (_, scale) = model.get_submodule(name), shape(name)
            shrink, expand = (tensors[f"{PREFIX}{name}.lora_{half}.weight"].double() for half in "AB")
            update = scale * expand @ shrink
            module.weight += (update if isinstance(module, nn.Linear) else update.T).float()
    return model


def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), V] of every position."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits


def write_gguf_adapter(
    path: Path,
    folder: Path,
    *,
    rank: int = 8,
    alpha: float = 8.0,
    seed: int = 0,
    architecture: str = "llama",
    **more: Any,
) -> Path:
    """Writes the adapter of a checkpoint of the llama architecture that `write_adapter` writes, as llama.cpp would."""
    config = reference_model(folder).config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | more).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors_of(folder, TARGETS, lambda _: (rank, 0.0), seed).items():
        module, half = name.removeprefix(PREFIX).removesuffix(".weight").split(".lora_")
        values = tensor.numpy()
        if half == "B" and module.endswith(("q_proj", "k_proj")):
            values = permute(values, config.num_attention_heads if "q_proj" in module else config.num_key_value_heads)
        writer.add_tensor(f"{gguf_name(f'{module}.weight')}.lora_{half.lower()}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
