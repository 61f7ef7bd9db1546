"""Quantized blocks of GGUF files as integers with scales. Layouts: ggml's `ggml-common.h`.

Types whose numbers are products of a table of vectors (IQ1, IQ2, IQ3_XXS) have no such form.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants

from pagewire.kernels.scales import Multiples
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import E2M1_BITS, E2M1_ZERO
from pagewire.shared.models.gguf.reader import TensorType

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]


class _Multiples(NamedTuple):
    """Factors [blocks, groups per block] of steps [blocks, 1]; see `Multiples`."""

    factors: npt.NDArray[np.int8]
    steps: Halves


class _Unpacked(NamedTuple):
    """Codes [blocks, numbers per block]; scales and minima [blocks, 1] or multiples of such; see `IntegerWeights`."""

    codes: Bytes
    bits: int
    zero: int
    scales: Halves | Floats | _Multiples
    minima: Halves | _Multiples | None = None


def unpack_integers(rows: Bytes, kind: TensorType) -> IntegerWeights | None:
    """Returns the rows [N, bytes] of a matrix as integers; None if the type does not store integers."""
    unpack = _UNPACK.get(kind.name)
    if unpack is None:
        return None
    integers = unpack(rows.reshape(-1, kind.size))

    def by_row(numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers).reshape(len(rows), -1))

    def scales(stored: Halves | Floats | _Multiples) -> torch.Tensor | Multiples:
        if isinstance(stored, _Multiples):
            return Multiples(by_row(stored.factors), by_row(stored.steps))
        return by_row(stored).float()

    minima = None if integers.minima is None else scales(integers.minima)
    return IntegerWeights(by_row(integers.codes), integers.bits, scales(integers.scales), integers.zero, minima)


def _q4_0(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_fields(blocks[:, 2:], 16, 4), 4, 8, _half(blocks, 0))


def _q4_1(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_fields(blocks[:, 4:], 16, 4), 4, 0, _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Unpacked:
    codes = _fields(blocks[:, 6:], 16, 4) | _fields(blocks[:, 2:6], 1, 1) << np.uint8(4)
    return _Unpacked(codes, 5, 16, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Unpacked:
    codes = _fields(blocks[:, 8:], 16, 4) | _fields(blocks[:, 4:8], 1, 1) << np.uint8(4)
    return _Unpacked(codes, 5, 0, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Unpacked:
    return _Unpacked(blocks[:, 2:] ^ np.uint8(128), 8, 128, _half(blocks, 0))


def _q2_k(blocks: Bytes) -> _Unpacked:
    factors = _fields(blocks[:, :16], 1, 4).reshape(-1, 16, 2).view(np.int8)
    scales = _Multiples(factors[:, :, 0], _half(blocks, 80))
    minima = _Multiples(factors[:, :, 1], -_half(blocks, 82))
    return _Unpacked(_fields(blocks[:, 16:80], 32, 2), 4, 0, scales, minima)


def _q3_k(blocks: Bytes) -> _Unpacked:
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << np.uint8(2)
    factors = _fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << np.uint8(4)
    return _Unpacked(codes, 4, 4, _Multiples(factors.view(np.int8) - np.int8(32), _half(blocks, 108)))


def _q4_k(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_fields(blocks[:, 16:], 32, 4), 4, 0, *_k_factors(blocks))


def _q5_k(blocks: Bytes) -> _Unpacked:
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _Unpacked(codes, 5, 0, *_k_factors(blocks))


def _q6_k(blocks: Bytes) -> _Unpacked:
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << np.uint8(4)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _Unpacked(codes, 6, 32, _Multiples(factors, _half(blocks, 208)))


def _iq4_nl(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_SPACED[_fields(blocks[:, 2:], 16, 4)], 8, 128, _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> _Unpacked:
    high = _fields(blocks[:, 2:4], 1, 2)
    factors = (_fields(blocks[:, 4:8], 1, 4) | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return _Unpacked(_SPACED[_fields(blocks[:, 8:], 16, 4)], 8, 128, _Multiples(factors, _half(blocks, 0)))


def _iq3_s(blocks: Bytes) -> _Unpacked:
    quants.IQ3_S.init_grid()
    vectors = blocks[:, 2:66].astype(np.uint16) | _fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    sizes = np.asarray(quants.IQ3_S.grid, np.int8).reshape(-1, 4)[vectors].reshape(len(blocks), -1)
    signs = 1 - 2 * _fields(blocks[:, 74:106], 1, 1).view(np.int8)
    factors = 1 + 2 * _fields(blocks[:, 106:110], 1, 4).view(np.int8)
    return _Unpacked((sizes * signs + 16).view(np.uint8), 5, 16, _Multiples(factors, _half(blocks, 0)))


def _tq1_0(blocks: Bytes) -> _Unpacked:
    return _ternary(blocks, quants.TQ1_0, 52)


def _tq2_0(blocks: Bytes) -> _Unpacked:
    return _ternary(blocks, quants.TQ2_0, 64)


def _ternary(blocks: Bytes, kind: Any, at: int) -> _Unpacked:
    """Returns the numbers -1, 0 and 1 of each block, which the package has at a scale of 1; the scale is at a byte."""
    unscaled = blocks.copy()
    unscaled[:, at : at + 2] = np.array([1], np.float16).view(np.uint8)
    return _Unpacked((kind.dequantize_blocks(unscaled) + 8).astype(np.uint8), 4, 8, _half(blocks, at))


def _mxfp4(blocks: Bytes) -> _Unpacked:
    scales = quants.MXFP4.e8m0_to_fp32_half(blocks[:, :1])
    return _Unpacked(_E2M1[_fields(blocks[:, 1:], 16, 4)], E2M1_BITS, E2M1_ZERO, scales)


def _nvfp4(blocks: Bytes) -> _Unpacked:
    scales = quants.NVFP4.ue4m3_to_fp32(blocks[:, :4]).astype(np.float32)
    return _Unpacked(_E2M1[_fields(blocks[:, 4:], 8, 4)], E2M1_BITS, E2M1_ZERO, scales)


_SPACED = (np.array(quants.IQ4_NL.kvalues) + 128).astype(np.uint8)
"""Codes of IQ4_NL's and IQ4_XS's 16 numbers, which are integers of eight bits at unequal distances."""
_E2M1 = (np.array(quants.MXFP4.kvalues) + E2M1_ZERO).astype(np.uint8)
"""Codes of twice the 16 numbers of a float of four bits."""

_UNPACK: Mapping[str, Callable[[Bytes], _Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}


def _k_factors(blocks: Bytes) -> tuple[_Multiples, _Multiples]:
    """Returns scales and minima of Q4_K and Q5_K: two halves, eight pairs of six bits, whose last four are split."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, rest & 15 | low >> 6 << 4), axis=1)
    minima = np.concatenate((high & 63, rest >> 4 | high >> 6 << 4), axis=1)
    return _Multiples(scales.view(np.int8), _half(blocks, 0)), _Multiples(minima.view(np.int8), -_half(blocks, 2))


def _fields(packed: Bytes, run: int, bits: int) -> Bytes:
    """Returns numbers of `bits`: of each `run` of bytes first all low bits, then all of the next bits, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _half(blocks: Bytes, at: int) -> Halves:
    """Returns the float16 number at a byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
