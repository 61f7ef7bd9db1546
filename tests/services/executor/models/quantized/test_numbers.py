"""Words as GPTQ's and AWQ's tools write them, taken apart by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.services.executor.models.quantized import awq, gptq, mxfp4, nvfp4
from pagewire.services.executor.models.quantized.numbers import unpack
from pagewire.services.executor.models.quantized.weight import Header, QuantizedWeight, StoredTensors
from tests.support.quantized import packed

DTYPES = {
    torch.int32: "I32",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
Weights = Callable[[dict[str, Any], StoredTensors], dict[str, QuantizedWeight]]


class Tensors:
    """`StoredTensors` in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = {f"proj.{name}": tensor for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def header(self, name: str) -> Header:
        return Header(DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def words(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def read(weights: Weights, config: dict[str, Any], **tensors: Tensor) -> Tensor:
    return weights(config, Tensors(**tensors))["proj.weight"].read()


@pytest.mark.parametrize(("form", "zeros"), [("gptq", 0x77777777), ("gptq_v2", 0x88888888)])
def test_gptq_packs_inputs_from_the_low_bits_and_stores_zeros_minus_one(form: str, zeros: int) -> None:
    matrix = read(
        gptq.weights,
        {"bits": 4, "group_size": 8, "checkpoint_format": form},
        qweight=words([0x76543210] * 7 + [0xFEDCBA98]),
        qzeros=words([zeros]),
        scales=torch.full((1, 8), 0.5).half(),
    )
    assert matrix[0].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    assert matrix[7].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def test_gptq_zeros_of_zero_have_borrowed_from_the_next() -> None:
    """GPTQModel stores zeros 0, 5, 8, 8, ... as the word of all of them minus 0x11111111."""
    matrix = read(
        gptq.weights,
        {"bits": 4, "group_size": 8},
        qweight=words([0x11111111] * 8),
        qzeros=words([0x88888850 - 0x11111111]),
        scales=torch.ones(1, 8).half(),
    )
    assert matrix[:3, 0].tolist() == [1.0, -4.0, -7.0]


def test_awq_interleaves_the_outputs_of_a_word() -> None:
    matrix = read(
        awq.weights,
        {"bits": 4, "group_size": 2, "zero_point": True},
        qweight=words([0x75316420], [0xFDB9ECA8]),
        qzeros=words([0x11111111]),
        scales=torch.full((1, 8), 2.0).half(),
    )
    assert matrix[:, 0].tolist() == [-2.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert matrix[:, 1].tolist() == [14.0, 16.0, 18.0, 20.0, 22.0, 24.0, 26.0, 28.0]


def test_fp4_has_the_low_half_of_a_byte_first() -> None:
    matrix = read(
        nvfp4.weights,
        {"quant_algo": "NVFP4"},
        weight=torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8),
        weight_scale=torch.tensor([[2.0]]).to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor(0.5),
    )
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert matrix[0].tolist() == positive + [-value for value in positive]


def test_experts_of_mxfp4_are_transposed() -> None:
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 1, 0, 0] = 0x72  # output 1: inputs 0 and 1
    tensors = Tensors(gate_up_proj_blocks=blocks, gate_up_proj_scales=torch.tensor([[[127], [130]]], dtype=torch.uint8))
    weight = mxfp4.weights({}, tensors)["proj.gate_up_proj"]
    assert weight.shape == (1, 32, 2)
    assert weight.read()[0, :3].tolist() == [[0.0, 8.0], [0.0, 48.0], [0.0, 0.0]]


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_follow_each_other_without_gaps(bits: int) -> None:
    numbers = torch.randint(1 << bits, (2, 45), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(packed(numbers, bits), bits, 45).long(), numbers)
