"""Quantized blocks of GGUF files as integers."""

import pytest
import torch

from pagewire.kernels.cpu.packed import pack_integers
from pagewire.services.executor.models.gguf.tensors import PLAIN, dequantize
from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.shared.models.gguf.reader import TENSOR_TYPES, TensorType
from tests.support.gguf_files import random_blocks

VECTORS = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
"""Types whose numbers are products of a table of vectors: these are unpacked."""
INTEGERS = [kind for kind in TENSOR_TYPES.values() if kind.name not in VECTORS | set(PLAIN)]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_are_the_numbers_of_the_package_gguf(kind: TensorType) -> None:
    rows = random_blocks(kind.name, 12).reshape(6, -1)
    integers = unpack_integers(rows, kind)
    assert integers is not None
    assert integers.codes.shape == (6, 2 * kind.block)
    assert torch.equal(integers.dequantize().view(torch.int32), dequantize(rows, kind).view(torch.int32))


@pytest.mark.parametrize(
    ("name", "bits"), [("Q2_K", 5.2), ("Q3_K", 4.6), ("Q4_K", 4.7), ("Q5_K", 5.7), ("Q6_K", 6.6), ("Q4_0", 4.6)]
)
def test_packed_blocks_take_little_more_than_in_the_file(name: str, bits: float) -> None:
    """Codes of two and three bits take four."""
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    integers = unpack_integers(random_blocks(name, 64 * 512 // kind.block).reshape(64, -1), kind)
    assert integers is not None
    packed = pack_integers(
        integers.codes, integers.bits, integers.scales, integers.zero, integers.minima, None, lanes=16
    )
    assert 8 * packed.nbytes <= bits * integers.codes.numel()


def test_reordered_rows_keep_their_scales() -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == "Q4_K")
    integers = unpack_integers(random_blocks("Q4_K", 12).reshape(6, -1), kind)
    assert integers is not None
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    assert torch.equal(integers.rows(order).dequantize(), integers.dequantize()[order])


def test_plain_numbers_and_vectors_are_no_integers() -> None:
    assert unpack_integers(random_blocks("Q8_0", 4), TensorType("F16", 1, 2)) is None
    for kind in TENSOR_TYPES.values():
        if kind.name in VECTORS:
            assert unpack_integers(random_blocks(kind.name, 4), kind) is None
