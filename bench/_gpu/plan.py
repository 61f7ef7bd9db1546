"""Bytes and operations that a step needs, and the steps that fit into a GPU; runs without one."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.services.executor.devices.sim.roofline import ModelShape

BLOCK_SIZE = 16
WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """Decode steps of some sequences that have grown to one length."""

    rows: int
    """Number of sequences."""
    context: int
    """Tokens of each sequence."""

    @property
    def blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.rows * -(-self.context // BLOCK_SIZE)


def grid(rows: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    """Returns every number of rows with every context."""
    return [Cell(count, context) for context in contexts for count in rows]


def weight_bytes(shape: ModelShape) -> int:
    """Returns the bytes of all parameters."""
    return shape.weights * WEIGHT_BYTES


def position_bytes(shape: ModelShape, itemsize: int) -> int:
    """Returns the bytes of one position in the KV cache, over all layers, with `itemsize` bytes per number."""
    return len(shape.windows) * 2 * shape.kv_heads * shape.head_dim * itemsize


def fitting(shape: ModelShape, cells: Sequence[Cell], room: int, itemsize: int) -> list[Cell]:
    """Returns the cells whose cache, with `itemsize` bytes per number, fits into `room` bytes beside the weights."""
    block = BLOCK_SIZE * position_bytes(shape, itemsize)
    return [cell for cell in cells if weight_bytes(shape) + cell.blocks * block <= room]


def decode_bytes(shape: ModelShape, rows: int, context: float, itemsize: int) -> float:
    """Returns the bytes that a decode step needs to move: weights, the cache of `context` positions, one position more.

    Of the embedding it reads a row per sequence, unless the table is also the output's matrix. Activations, logits and
    sampling are left out: a share of the bandwidth that is computed from this is never too high.
    """
    weights = shape.layer_weights + shape.vocab * shape.hidden + rows * shape.hidden
    per_layer = position_bytes(shape, itemsize) / len(shape.windows)
    cached = sum(min(context, window or context) + 1 for window in shape.windows)
    return weights * WEIGHT_BYTES + rows * cached * per_layer


def attention_flops(shape: ModelShape, tokens: int) -> float:
    """Returns the operations of a layer's causal attention over a whole prompt, without those that the mask hides."""
    return 4.0 * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2


def prefill_flops(shape: ModelShape, tokens: int) -> float:
    """Returns the operations of a prompt as one step: products, attention without windows, and the last logits."""
    products = 2.0 * tokens * shape.layer_weights + 2.0 * shape.vocab * shape.hidden
    return products + len(shape.windows) * attention_flops(shape, tokens)


def working_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals (begin, end): the time in which there was work."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def load_bytes(shape: ModelShape, steps: int, lengths: Sequence[tuple[int, int]], itemsize: int) -> float:
    """Returns the bytes that `steps` steps move at least to serve requests of (prompt, output) tokens.

    Every step reads the weights; the step of each output token but the first, which a prompt's step makes, reads the
    sequence so far.
    """
    read = sum((output - 1) * prompt + (output - 1) * (output - 2) // 2 for prompt, output in lengths)
    written = sum(prompt + output - 1 for prompt, output in lengths)
    return steps * decode_bytes(shape, 0, 0, itemsize) + (read + written) * position_bytes(shape, itemsize)
