"""Quantized weights stay so on the GPU: the logits are those of the dequantized model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.quantized_linear import (
    CudaPacking,
    EightBitLinear,
    IntegerLinear,
    join_integers,
)
from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.models.gguf.reader import TENSOR_TYPES
from pagewire.shared.models.model_folder import read_config
from tests.kernels.triton.references import integer_linear as integer_linear_reference
from tests.kernels.triton.references import round_rows as round_rows_reference
from tests.services.executor.devices.cuda.twins import GREEDY, batch_of, cpu_device, cuda_device
from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import random_blocks
from tests.support.quantized import Method, awq, compressed_tensors, fp8, gptq, modelopt, write

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPT = [7, 300, 41, 5, 88, 12, 450, 3, 77]
INT8 = partial(
    compressed_tensors,
    "int-quantized",
    activations={"num_bits": 8, "dynamic": True, "strategy": "token"},
    strategy="channel",
)


def kinds(folder: Path, *, with_fp8: bool = True) -> set[type]:
    model = load_model(folder, read_config(folder), "float32", CudaPacking(with_fp8))
    linear = (IntegerLinear, EightBitLinear, nn.Linear, PackedLinear)
    return {type(module) for name, module in model.named_modules() if isinstance(module, linear) and "model." in name}


def logits(device: CpuDevice | CudaDevice) -> Tensor:
    """[2, V] behind a prompt, and behind a decode."""
    plain, seen = device._model.logits, []

    def kept(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        result = plain(hidden, out)
        seen.append(result[:1].clone().cpu())
        return result

    device._model.logits = kept  # type: ignore[method-assign]
    device.add(1, [9, 4], GREEDY)
    token = device.launch(batch_of((1, 0, PROMPT, True))).wait()
    device.launch(batch_of((1, len(PROMPT), token.tolist(), True))).wait()
    return torch.cat(seen)


def round_inputs(device: CpuDevice, dtype: torch.dtype, group: int | None) -> None:
    """Makes the products of the layers round their inputs, as the kernel is meant to."""

    def rounded(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        size = group or x.shape[1]
        values, scales = round_rows_reference.reference(x, size, dtype)
        return ((values.float().view(len(x), -1, size) * scales[:, :, None]).flatten(1),)

    for module in device._model.modules():
        if isinstance(module, PackedLinear):
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize(
    ("method", "rounding", "bound"),
    [
        pytest.param(partial(gptq, 4), None, 1e-4, id="gptq", marks=pytest.mark.full),
        pytest.param(awq, None, 1e-4, id="awq"),
        pytest.param(partial(modelopt, "NVFP4"), None, 1e-4, id="nvfp4", marks=pytest.mark.full),
        pytest.param(INT8, (torch.int8, None), 0.02, id="int8"),
        pytest.param(partial(fp8, (32, 32)), (torch.float8_e4m3fn, 32), 0.02, id="fp8 blocks"),
    ],
)
def test_logits_equal_the_dequantized_models(
    method: Callable[[], Method], rounding: tuple[torch.dtype, int | None] | None, bound: float, tmp_path: Path
) -> None:
    """Where activations are rounded, one that lies between two numbers may be rounded to the other."""
    folder = write(checkpoint("llama-biased" if method is awq else "llama"), tmp_path, method())
    rows = logits(cuda_device(folder, captured=False, packing=CudaPacking(fp8=True)))
    twin = cpu_device(tmp_path / "plain")
    if rounding is not None:
        exact = logits(cpu_device(tmp_path / "plain"))
        assert relative(rows, exact) > 10 * 1e-4, "activations are not rounded"
        round_inputs(twin, *rounding)
    assert relative(rows, logits(twin)) < bound


def relative(made: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, by the spread of what is expected."""
    return float((made - expected).pow(2).mean().sqrt() / expected.std())


def test_every_layout_has_its_kernel(tmp_path: Path) -> None:
    for name, method, expected in (
        ("gptq", gptq(3), {IntegerLinear}),
        ("scattered", gptq(4, desc_act=True), {PackedLinear}),
        ("nvfp4", modelopt("NVFP4"), {IntegerLinear}),
        ("int8", INT8(), {EightBitLinear}),
        ("int8 weights", compressed_tensors("pack-quantized", strategy="channel"), {IntegerLinear}),
        ("fp8", fp8(None, "weight_scale"), {EightBitLinear}),
        ("cut blocks", fp8((40, 40)), {nn.Linear}),
    ):
        folder = write(checkpoint("opt" if name == "cut blocks" else "llama"), tmp_path / name, method)
        assert expected <= kinds(folder), name
    assert EightBitLinear not in kinds(tmp_path / "fp8" / "quantized", with_fp8=False)


@pytest.mark.parametrize("names", [("Q4_K", "Q5_K"), ("Q6_K", "Q3_K")])
def test_scales_in_two_levels_are_joined_as_floats(names: tuple[str, str]) -> None:
    types = {kind.name: kind for kind in TENSOR_TYPES.values()}
    unpacked = [unpack_integers(random_blocks(name, 4).reshape(2, -1), types[name]) for name in names]
    parts = [part for part in unpacked if part is not None]
    weights = integer_linear_reference.reference(torch.eye(512), join_integers(parts), None).T
    expected = torch.cat([part.dequantize() for part in parts])
    torch.testing.assert_close(weights.float(), expected, rtol=1e-6, atol=1e-6)
