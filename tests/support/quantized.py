"""Tiny quantized checkpoints, each beside the same model with its weights dequantized.

Where a package that runs without a GPU writes a format, it writes these; what GPTQ's and AWQ's tools write is packed
here, number by number.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagewire.services.executor.models.quantized.numbers import E2M1_TWICE

Parts = dict[str, Tensor]
"""The tensors that are stored in place of a weight, by what their names end with."""
GROUP = 32


class Method(NamedTuple):
    """A way to quantize the weights of a model."""

    config: dict[str, Any]
    """Its `quantization_config`."""
    quantize: Callable[[Tensor], tuple[Parts, Tensor]]
    """A weight [N, K] -> what is stored, and the float32 weight that it stands for."""


def write(source: Path, folder: Path, method: Method, chosen: str = "_proj.weight") -> Path:
    """Writes `folder`/quantized and, with the dequantized weights, `folder`/plain; returns the first.

    All weights of `source` whose names end with `chosen` are quantized.
    """
    tensors = load_file(source / "model.safetensors")
    quantized, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(chosen)]:
        parts, plain[name] = method.quantize(quantized.pop(name).float())
        module = name.removesuffix(".weight")
        quantized = {f"{module}{end}": part for end, part in parts.items()} | quantized
    for kind, content in (("quantized", quantized), ("plain", plain)):
        shutil.copytree(source, folder / kind)
        save_file({name: part.contiguous() for name, part in content.items()}, folder / kind / "model.safetensors")
    set_config(folder / "quantized", method.config)
    return folder / "quantized"


def set_config(folder: Path, quantization: dict[str, Any] | None) -> None:
    """Replaces the `quantization_config` of a model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to nearest: codes [N, K], float16 scales [N, G] and zeros [N, G], which are at least 1."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scales = (groups.abs().amax(2) / (1 << bits - 1)).half()
        zeros = torch.full_like(low, 1 << bits - 1)
    else:
        scales = ((high - low) / ((1 << bits) - 1)).half()
        zeros = (-low / scales).round().clamp(1, (1 << bits) - 1)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, (1 << bits) - 1)
    return codes.view_as(weight).long(), scales, zeros.long()


def packed(numbers: Tensor, bits: int) -> Tensor:
    """[rows, count] -> int32 [rows, words]: the numbers of a row as one long binary number, cut into words."""
    wide = -(-numbers.shape[1] * bits // 32)
    rows = [sum(int(number) << bits * i for i, number in enumerate(row)) for row in numbers.tolist()]
    words = [[row >> 32 * word & 0xFFFFFFFF for word in range(wide)] for row in rows]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


def gptq(
    bits: int, group: int = GROUP, *, form: str = "gptq", symmetric: bool = True, desc_act: bool = False
) -> Method:
    """As AutoGPTQ and GPTQModel store it; with `desc_act` the inputs of a group are scattered."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": desc_act,
        "sym": symmetric,
        "checkpoint_format": form,
        "lm_head": False,
    }

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs, size = weight.shape[1], weight.shape[1] if group == -1 else group
        order = torch.arange(inputs)
        if desc_act:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, scales, zeros = rounded(weight[:, order], bits, size, symmetric=symmetric)
        group_of = torch.arange(inputs) // size
        values = (codes - zeros[:, group_of]) * scales[:, group_of].float()
        back = order.argsort()
        parts = {
            ".qweight": packed(codes[:, back], bits).T,
            ".qzeros": packed(zeros.T - int(form == "gptq"), bits),
            ".scales": scales.T,
            ".g_idx": group_of[back].int(),
            ".bias": torch.zeros(len(weight)).half(),
        }
        return parts, values[:, back]

    return Method(config, quantize)


def awq(group: int = GROUP) -> Method:
    """As AutoAWQ stores it."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the output that each nibble of a word holds

    def interleaved(numbers: Tensor) -> Tensor:
        return packed(numbers.view(len(numbers), -1, 8)[:, :, places].flatten(1), 4)

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, scales, zeros = rounded(weight, 4, group, symmetric=False)
        group_of = torch.arange(weight.shape[1]) // group
        values = (codes - zeros[:, group_of]) * scales[:, group_of].float()
        return {".qweight": interleaved(codes.T), ".qzeros": interleaved(zeros.T), ".scales": scales.T}, values

    return Method(config, quantize)


def compressed_tensors(form: str, activations: dict[str, Any] | None = None, **numbers: Any) -> Method:
    """As the library compressed-tensors stores it, in its own format of that name; see `QuantizationArgs` there."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**numbers)
    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    library = BaseCompressor.get_value_from_registry(form)
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "quantization_status": "compressed",
    }

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, width = weight.shape
        if arguments.strategy == "tensor":
            blocks = weight.view(1, 1, -1)
        elif arguments.strategy == "block":
            rows, columns = arguments.block_structure or []
            blocks = weight.view(outputs // rows, rows, -1, columns).transpose(1, 2).flatten(2)
        else:
            blocks = weight.view(outputs, -1, arguments.group_size or width)
        state: Parts = {"weight": weight}
        if arguments.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        scale, zero = calculate_qparams(
            blocks.amin(2), blocks.amax(2), arguments, global_scale=state.get("weight_global_scale")
        )
        if arguments.strategy == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        state["weight_scale"] = scale
        if not arguments.symmetric:
            state["weight_zero_point"] = zero.round().to(torch.int8)
        stored = library.compress(state, scheme)
        plain = library.decompress(stored, scheme)["weight"]
        return {f".{name}": part for name, part in stored.items()} | {".input_scale": torch.ones(1)}, plain

    return Method(config, quantize)


def fp8(block: tuple[int, int] | None, scale: str = "weight_scale_inv") -> Method:
    """As DeepSeek and Qwen store it in blocks, and vLLM per tensor."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = block or weight.shape
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, stored = torch.empty(grid), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        values = torch.empty_like(weight)
        for i, j in np.ndindex(*grid):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = stored[part].float() * scales[i, j]
        kept = scales if block is not None else scales.view(())
        return {".weight": stored, f".{scale}": kept, ".input_scale": torch.ones(())}, values

    return Method(config, quantize)


def mxfp4() -> Method:
    """As gpt-oss stores its experts; transformers says which weights they are."""
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        experts, inputs, outputs = weight.shape
        random = torch.Generator().manual_seed(inputs)
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:3], generator=random, dtype=torch.uint8)
        return {"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales)

    return Method(config, quantize)


def modelopt(algorithm: str) -> Method:
    """As NVIDIA's ModelOpt stores it."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    if algorithm == "FP8":
        return Method(config, fp8(None, "weight_scale").quantize)

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        levels = torch.tensor(E2M1_TWICE) / 2
        groups = weight.view(len(weight), -1, 16)
        whole = weight.abs().max() / (448 * 6)
        scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        factors = (scales.float() * whole)[:, :, None]
        nearest = ((groups / factors).abs()[..., None] - levels).abs().argmin(3)
        values = (levels[nearest] * groups.sign() * factors).view_as(weight)
        codes = (nearest + 8 * (groups < 0)).view_as(weight).to(torch.uint8)
        parts = {".weight": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": scales, ".weight_scale_2": whole}
        return parts | {".input_scale": torch.ones(())}, values

    return Method(config, quantize)
