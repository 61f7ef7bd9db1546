"""The layouts of weights that the compiled matrix products read."""

import ctypes
from collections.abc import Sequence
from ctypes import addressof, c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.scales import Multiples

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes of weights and tables in the kernels."""
INTEGERS = {4: 3, 5: 4, 6: 5, 8: 6}
"""Numbers of integer weights in the kernels, by bits."""
POOL_DTYPES = DTYPES | {torch.int8: INTEGERS[8]}
"""Numbers of the dtypes of KV pools in the kernels."""
CHUNK = 32
"""Inputs that an integer product rounds together."""
ALIGNMENT = 64
"""Bytes to a multiple of which panels are aligned: a line of the cache."""


class Scales(ctypes.Structure):
    """The scales or the minima of integer weights: the struct `Scales` of `kernels.hpp`."""

    _fields_ = (("numbers", c_void_p), ("steps", c_void_p), ("dtype", c_int64), ("shift", c_int64))


class Weights(ctypes.Structure):
    """The weights of a matrix product, or the rows of a table: the struct `Weights` of `kernels.hpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind", "zero", "group")),
        *((name, Scales) for name in ("scales", "minima")),
    )


class Matrix(ctypes.Structure):
    """Weights side by side, which multiply the same inputs: the struct `Matrix` of `kernels.hpp`."""

    _fields_ = (("parts", c_void_p), ("count", c_int64), ("inputs", c_int64), ("outputs", c_int64))


@dataclass(frozen=True, slots=True)
class Packed:
    """The weights of a matrix product in the kernels' layout, in one part or in several side by side."""

    parts: ctypes.Array[Weights]
    """Structs of the parts; the outputs of each follow the outputs of the part before."""
    tensors: tuple[Tensor, ...]
    """The tensors that the parts point to."""
    inputs: int
    outputs: int

    @property
    def matrix(self) -> Matrix:
        """The struct that the kernels read. This object must outlive it."""
        return Matrix(addressof(self.parts), len(self.parts), self.inputs, self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def side_by_side(weights: Sequence[Packed]) -> Packed:
    """Returns weights that give the outputs of all `weights`, one after the other; all have the same inputs."""
    parts = [part for one in weights for part in one.parts]
    tensors = tuple(tensor for one in weights for tensor in one.tensors)
    return Packed((Weights * len(parts))(*parts), tensors, weights[0].inputs, sum(one.outputs for one in weights))


def joined(weights: Sequence[Packed]) -> Tensor:
    """Moves the panels of weights in floats, without biases, into one tensor, in their order, and returns it.

    Panels of small weights that are used in this order then reach the cache in time: prefetching goes on from one to
    the next.
    """
    panels = [one.tensors[0].flatten().view(torch.uint8) for one in weights]
    padded = [F.pad(each, (0, -len(each) % ALIGNMENT)) for each in panels]
    together = torch.cat(padded)
    address = together.data_ptr()
    for one, each in zip(weights, padded, strict=True):
        one.parts[0].panels = address
        address += len(each)
    return together


def table(rows: Tensor) -> Packed:
    """Returns a contiguous table [V, D] without a copy."""
    vocabulary, width = rows.shape
    return _one(Weights(inputs=width, outputs=vocabulary, kind=DTYPES[rows.dtype]), panels=rows)


def pack_floats(weight: Tensor, bias: Tensor | None, lanes: int, paired: int, depth: int) -> Packed:
    """Returns a copy of the weights [N, K], in their own dtype, and of the bias [N].

    Args:
        weight: in one of `DTYPES`.
        bias: of any floating dtype.
        lanes: floats per register.
        paired: numbers per multiplication; see `CpuKernels`.
        depth: number to a multiple of which the inputs of weights in bf16 are padded.
    """
    outputs, inputs = weight.shape
    narrow = weight.dtype == torch.bfloat16
    together = paired if narrow else 1
    padded = F.pad(weight, (0, -inputs % (depth if narrow else 1), 0, -outputs % (2 * lanes)))
    panels = padded.reshape(-1, 2, lanes, padded.shape[1] // together, together)
    if narrow and together == 1:
        panels = panels.transpose(1, 2)
    packed = panels.permute(0, 3, 1, 2, 4).clone(memory_format=torch.contiguous_format)
    return _one(
        Weights(inputs=inputs, outputs=outputs, kind=DTYPES[weight.dtype]), panels=packed, bias=_padded(bias, lanes)
    )


def fold(weight: Tensor, lanes: int, depth: int) -> tuple[Tensor, Tensor]:
    """Returns the weights [outputs, inputs] of whole panels, and those of the others, folded to fill a panel.

    If these are at most `lanes` outputs, both halves of their inputs lie one below the other [2 * lanes, inputs / 2],
    each padded to `lanes` rows; otherwise there are none of them. `depth` is that of `pack_floats`.

    >>> whole, folded = fold(torch.arange(8.0).view(2, 4), 2, 1)
    >>> whole.tolist(), folded.tolist()
    ([], [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]])
    """
    outputs, inputs = weight.shape
    rest = outputs % (2 * lanes)
    if not 0 < rest <= lanes or inputs % (2 * depth):
        return weight, weight[:0]
    halves = weight[outputs - rest :].reshape(rest, 2, inputs // 2).transpose(0, 1)
    return weight[: outputs - rest], F.pad(halves, (0, 0, 0, lanes - rest)).flatten(0, 1)


def pack_integers(
    codes: Tensor,
    bits: int,
    scales: Tensor | Multiples,
    zero: int,
    minima: Tensor | Multiples | None,
    bias: Tensor | None,
    lanes: int,
) -> Packed:
    """Returns a copy of weights scales[n, g] * (codes[n, k] - zero) + minima[n, g], where k is in group g.

    Multiples of steps stay such. Other scales and minima are stored in float16 if it can express all of them exactly,
    else in float32.

    Args:
        codes: uint8 [N, K], below 2**bits.
        bits: one of `INTEGERS`.
        scales: float32 [N, groups], or multiples of steps; groups are of 16 inputs, of a multiple of 32, or all inputs.
        zero: the code of 0 without minima.
        minima: like `scales`; None: zeros.
        bias: [N] of any floating dtype; None: zeros.
        lanes: floats per register.
    """
    outputs, inputs = codes.shape
    padded = F.pad(codes, (0, -inputs % CHUNK, 0, -outputs % (2 * lanes)))
    quads = padded.view(-1, 2, lanes, padded.shape[1] // CHUNK, CHUNK // 4, 4).permute(0, 3, 4, 1, 2, 5).flatten(3)
    if bits == 8:
        panels = quads.contiguous()
    elif bits == 4:
        panels = _together(quads, 4)
    else:
        panels = torch.cat((_together(quads & 15, 4), _together(quads >> 4, bits - 4)), dim=2)
    group = inputs // scales.shape[1]
    weights = Weights(inputs=inputs, outputs=outputs, kind=INTEGERS[bits], zero=zero, group=group)
    (weights.scales, of_scales), (weights.minima, of_minima) = _scales(scales, lanes), _scales(minima, lanes)
    return _one(weights, *of_scales, *of_minima, panels=panels, bias=_padded(bias, lanes))


def _one(weights: Weights, *others: Tensor, **tensors: Tensor | None) -> Packed:
    """Returns weights of one part that point to `tensors` by their names, and to `others` already."""
    for name, tensor in tensors.items():
        setattr(weights, name, None if tensor is None else tensor.data_ptr())
    pointed = tuple(tensor for tensor in tensors.values() if tensor is not None)
    return Packed((Weights * 1)(weights), (*pointed, *others), weights.inputs, weights.outputs)


def _scales(numbers: Tensor | Multiples | None, lanes: int) -> tuple[Scales, tuple[Tensor, ...]]:
    """Returns scales or minima in the kernels' layout, and the tensors that they point to."""
    if numbers is None:
        return Scales(), ()
    if isinstance(numbers, Multiples):
        factors, steps = _padded_groups(numbers.factors, lanes), _padded_groups(numbers.steps, lanes)
        shift = numbers.together.bit_length() - 1
        return Scales(factors.data_ptr(), steps.data_ptr(), INTEGERS[8], shift), (factors, steps)
    floats = _narrowed(_padded_groups(numbers, lanes))
    return Scales(numbers=floats.data_ptr(), dtype=DTYPES[floats.dtype]), (floats,)


def _together(quads: Tensor, bits: int) -> Tensor:
    """Returns codes of `bits` [panels, chunks, quads, bytes] with as many quads in a byte as fit, the first lowest."""
    panels, chunks, count, size = quads.shape
    several = quads.reshape(panels, chunks, count * bits // 8, 8 // bits, size)
    packed = several[:, :, :, 0].clone()
    for at in range(1, 8 // bits):
        packed |= several[:, :, :, at] << bits * at
    return packed


def _padded(bias: Tensor | None, lanes: int) -> Tensor | None:
    """Returns float32 [panels, outputs per panel]."""
    return None if bias is None else F.pad(bias.float(), (0, -len(bias) % (2 * lanes))).view(-1, 2 * lanes)


def _padded_groups(numbers: Tensor, lanes: int) -> Tensor:
    """Returns [N, groups] as [panels, groups, outputs per panel]."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % (2 * lanes)))
    return padded.view(-1, 2 * lanes, numbers.shape[1]).transpose(1, 2).contiguous()


def _narrowed(numbers: Tensor) -> Tensor:
    half = numbers.half()
    return half if torch.equal(half.float(), numbers) else numbers
