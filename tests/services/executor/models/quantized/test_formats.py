"""Quantized checkpoints have the weights, and give the tokens, of the same models with dequantized weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import Linear
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.tensors import open_tensors
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.services.executor.conftest import Drive
from tests.support.checkpoints import checkpoint
from tests.support.quantized import Method, awq, compressed_tensors, fp8, gptq, modelopt, mxfp4, set_config, write

PROMPT = list(range(3, 40))
METHODS: dict[str, Callable[[], Method]] = {
    "gptq": partial(gptq, 4),
    "gptq v2": partial(gptq, 4, form="gptq_v2", symmetric=False),
    "gptq asymmetric": partial(gptq, 4, symmetric=False),
    "gptq desc_act": partial(gptq, 4, desc_act=True, symmetric=False),
    "gptq 2 bits": partial(gptq, 2, symmetric=False),
    "gptq 3 bits": partial(gptq, 3, symmetric=False),
    "gptq 8 bits": partial(gptq, 8, group=-1),
    "awq": awq,
    "fp8 blocks": partial(fp8, (40, 32)),
    "fp8 tensor": partial(fp8, None, "weight_scale"),
    "modelopt fp8": partial(modelopt, "FP8"),
    "modelopt nvfp4": partial(modelopt, "NVFP4"),
    "int8 channel": partial(compressed_tensors, "int-quantized", strategy="channel"),
    "int8 tensor": partial(compressed_tensors, "naive-quantized", strategy="tensor"),
    "int8 asymmetric": partial(compressed_tensors, "int-quantized", strategy="channel", symmetric=False),
    "int8 blocks": partial(compressed_tensors, "int-quantized", strategy="block", block_structure=[16, 32]),
    "packed int8": partial(compressed_tensors, "pack-quantized", strategy="channel"),
    "packed int4": partial(compressed_tensors, "pack-quantized", num_bits=4, strategy="group", group_size=32),
    "packed int4 asymmetric": partial(
        compressed_tensors, "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "packed int3": partial(
        compressed_tensors, "pack-quantized", num_bits=3, strategy="group", group_size=32, symmetric=False
    ),
    "packed tensor": partial(compressed_tensors, "pack-quantized", num_bits=4, strategy="tensor", symmetric=False),
    "float8 channel": partial(compressed_tensors, "float-quantized", type="float", strategy="channel"),
    "float8 blocks": partial(
        compressed_tensors, "naive-quantized", type="float", strategy="block", block_structure=[16, 32]
    ),
    "packed nvfp4": partial(
        compressed_tensors,
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
    "packed mxfp4": partial(
        compressed_tensors,
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
    ),
}
WITHOUT_INTEGERS = {"gptq desc_act", "fp8 blocks", "fp8 tensor", "modelopt fp8", "float8 channel", "float8 blocks"}


def parameters(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    config = read_config(folder)
    return dict(load_model(folder, config, "bfloat16" if dtype == "bfloat16" else "float32").named_parameters())


@pytest.mark.parametrize("name", METHODS)
def test_weights_equal_the_dequantized_models(name: str, tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, METHODS[name]())
    dtype = "bfloat16" if name == "packed nvfp4" else "float32"  # the library gives bf16
    result, expected = parameters(folder, dtype), parameters(tmp_path / "plain", dtype)
    assert result.keys() == expected.keys()
    for parameter, value in expected.items():
        assert torch.equal(result[parameter], value), parameter
    check_integers(folder, expressible=name not in WITHOUT_INTEGERS)


def check_integers(folder: Path, *, expressible: bool) -> None:
    """Integers, if there are any, are the weights that are read otherwise."""
    module = "model.layers.1.mlp.down_proj.weight"
    with open_tensors(folder, read_config(folder)["quantization_config"]) as source:
        integers = source.integers(module)
        assert source.integers("model.norm.weight") is None
        assert (integers is not None) == expressible
        if integers is not None:
            whole = torch.empty(source.shape(module))
            source.read({module: whole})
            torch.testing.assert_close(integers.dequantize(), whole, rtol=1e-6, atol=1e-7)


def test_symmetric_zeros_that_are_stored_as_they_are_are_known(tmp_path: Path) -> None:
    """Some tools do so, although they name the layout that stores each zero minus one."""
    folder = write(checkpoint("llama"), tmp_path, gptq(4, form="gptq_v2"))
    set_config(folder, read_config(folder)["quantization_config"] | {"checkpoint_format": "gptq"})
    result, expected = parameters(folder), parameters(tmp_path / "plain")
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_other_zeros_than_the_settings_say_are_refused(tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, gptq(4, symmetric=False))
    set_config(folder, read_config(folder)["quantization_config"] | {"sym": True})
    with pytest.raises(ConfigurationError, match=r"qzeros has zeros other than 8, although .* says sym"):
        parameters(folder)


@pytest.mark.parametrize("name", ["gptq asymmetric", "gptq 3 bits", "awq", "int8 channel", "modelopt nvfp4"])
def test_integers_stay_packed_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Its kernels round activations to eight bits."""
    folder = write(checkpoint("llama"), tmp_path, METHODS[name]())
    packing = CpuPacking(CpuKernels(build.load(), 1), None)
    layer = load_model(folder, read_config(folder), "float32", packing).get_submodule("model.layers.1.mlp.down")
    assert isinstance(layer, Linear)
    weight = parameters(tmp_path / "plain")["model.layers.1.mlp.down.weight"]
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    error = layer(x) - x @ weight.T
    assert error.pow(2).mean().sqrt() < 0.01 * (x @ weight.T).std()


@pytest.mark.parametrize("name", ["gptq desc_act", "awq", "fp8 blocks", "packed int4 asymmetric", "packed mxfp4"])
def test_tokens_equal_the_dequantized_models(name: str, drive: Drive, tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, METHODS[name]())
    texts = []
    for path in (folder, tmp_path / "plain"):
        driver = drive(path)
        driver.add(0, len(PROMPT) + 12)
        texts.append(driver.generate(0, PROMPT, 12, chunk=10))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model", "method", "chosen"),
    [("gpt-oss", mxfp4, "experts.gate_up_proj"), ("gpt-neox", partial(gptq, 4), "mlp.dense_h_to_4h.weight")],
)
def test_tokens_of_transformers_models_equal_the_dequantized_models(
    model: str, method: Callable[[], Method], chosen: str, drive: Drive, tmp_path: Path
) -> None:
    folder = write(checkpoint(model), tmp_path, method(), chosen)
    texts = []
    for path in (folder, tmp_path / "plain"):
        driver = drive(path)
        driver.add(0, len(PROMPT) + 12)
        texts.append(driver.generate(0, PROMPT, 12, chunk=10))
    assert texts[0] == texts[1]


GPTQ_MIXED = gptq(4).config | {"dynamic": {"-:.*lm_head": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 16}}}
INT4, INT8 = METHODS["packed int4"](), METHODS["int8 channel"]()
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": INT4.config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "group_1": INT8.config["config_groups"]["group_0"]
        | {"format": "int-quantized", "targets": [r"re:.*\.down_proj$"]},
    },
}


@pytest.mark.parametrize(
    ("most", "some", "config"), [(gptq(4), gptq(8, group=16), GPTQ_MIXED), (INT4, INT8, MIXED)], ids=["gptq", "mixed"]
)
def test_modules_may_have_settings_of_their_own(
    most: Method, some: Method, config: dict[str, Any], tmp_path: Path
) -> None:
    folders = [write(checkpoint("llama"), tmp_path / kind, method) for kind, method in (("4", most), ("8", some))]
    for kind in ("quantized", "plain"):
        files = [folder.parent / kind / "model.safetensors" for folder in folders]
        tensors, others = (load_file(file) for file in files)
        tensors = {name: tensor for name, tensor in tensors.items() if ".down_proj." not in name}
        save_file(tensors | {name: tensor for name, tensor in others.items() if ".down_proj." in name}, files[0])
    set_config(folders[0], config)
    result, expected = parameters(folders[0]), parameters(folders[0].parent / "plain")
    for parameter, value in expected.items():
        assert torch.equal(result[parameter], value), parameter
