"""A quantized checkpoint that cannot be right is refused in one line, before its weights are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.services.executor.models.quantized.formats import MODELOPT_FILE, find_format
from pagewire.services.executor.models.quantized.weight import Header
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint
from tests.support.quantized import Method, awq, compressed_tensors, fp8, gptq, modelopt, mxfp4, set_config, write

PROJECTION = "model.layers.1.mlp.down_proj"


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, read_config(folder), "float32")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes are not supported: use the unquantized"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "quip"}, "quant_method quip of config.json is not supported, only awq, compressed-tensors"),
        ({}, "quant_method None"),
        ({"quant_method": "gptq"}, "missing required field `bits`"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
        ({"quant_method": "awq", "bits": 8}, "bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "config_groups": {},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparse weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 9}}},
            },
            "num_bits",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, Method(config, lambda weight: ({".weight": weight}, weight)))
    assert words in refusal(folder)


METHODS = {
    "gptq": (gptq(4), "qzeros"),
    "awq": (awq(), "scales"),
    "fp8": (fp8((32, 32)), "weight_scale_inv"),
    "modelopt": (modelopt("NVFP4"), "weight_scale_2"),
    "packed": (compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32), "weight_scale"),
    "int8": (compressed_tensors("int-quantized", strategy="channel"), "weight_scale"),
}


@pytest.mark.parametrize("name", METHODS)
def test_parts_that_are_missing_or_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    method, part = METHODS[name]
    folder = write(checkpoint("llama"), tmp_path, method)
    tensor = f"{PROJECTION}.{part}"
    edit(folder, lambda tensors: tensors.update({tensor: torch.cat([tensors[tensor].view(1, -1)] * 2)}))
    assert f"tensor {tensor} is" in refusal(folder)
    edit(folder, lambda tensors: tensors.pop(tensor))
    assert "the checkpoint misses tensor" in refusal(folder)


def test_indices_of_missing_groups_are_refused(tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, gptq(4))
    edit(folder, lambda tensors: tensors[f"{PROJECTION}.g_idx"].fill_(7))
    assert "names groups that are not there" in refusal(folder)


def test_a_bias_that_the_model_lacks_may_be_zeros_alone(tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, gptq(4))
    load_model(folder, read_config(folder), "float32")
    edit(folder, lambda tensors: tensors[f"{PROJECTION}.bias"].fill_(1))
    assert f"unexpected tensors: {PROJECTION}.bias" in refusal(folder)


def test_a_module_in_no_group_is_refused(tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, METHODS["int8"][0])
    config = read_config(folder)["quantization_config"]
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    set_config(folder, config)
    assert "no config_group with weights for model.layers.0.mlp" in refusal(folder)


def test_experts_without_scales_are_refused(tmp_path: Path) -> None:
    folder = write(checkpoint("gpt-oss"), tmp_path, mxfp4(), "experts.gate_up_proj")
    edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.experts.gate_up_proj_scales"))
    assert "misses tensor model.layers.0.mlp.experts.gate_up_proj_scales" in refusal(folder)


def test_modelopts_own_settings_file_is_read(tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, modelopt("NVFP4"))
    set_config(folder, None)
    file = folder / MODELOPT_FILE
    file.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    load_model(folder, read_config(folder), "float32")
    file.write_text('{"quantization": 3}')
    assert f"{MODELOPT_FILE} cannot be used" in refusal(folder)


def test_no_weight_is_read_before_all_are_checked() -> None:
    class Headers:
        stored: ClassVar = {
            "a.qweight": Header("I32", (64, 4)),
            "a.qzeros": Header("I32", (2, 4)),
            "a.scales": Header("F16", (2, 32)),
            "b.qweight": Header("I32", (64, 4)),
        }

        def names(self) -> list[str]:
            return list(self.stored)

        def header(self, name: str) -> Header:
            return self.stored[name]

        def tensor(self, name: str) -> Tensor:
            raise AssertionError(f"{name} was read")

    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    with pytest.raises(ConfigurationError, match=r"misses tensor b\.qzeros"):
        find_format(config)(config, Headers())
