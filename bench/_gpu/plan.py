"""What a step must move and compute, and which steps fit into a GPU: arithmetic that needs none."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.services.executor.devices.roofline import Shape

BLOCK_SIZE = 16
WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """Decode steps of some sequences that have grown to one length."""

    rows: int
    """Sequences."""
    context: int
    """Tokens of each."""

    @property
    def blocks(self) -> int:
        """Of the KV pool."""
        return self.rows * -(-self.context // BLOCK_SIZE)


def grid(rows: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    """Every size of batch with every context."""
    return [Cell(count, context) for context in contexts for count in rows]


def weight_bytes(shape: Shape) -> int:
    """Of all parameters."""
    return shape.weights * WEIGHT_BYTES


def position_bytes(shape: Shape, itemsize: int) -> int:
    """Of one position in the KV cache, over all layers, with `itemsize` bytes per number."""
    return len(shape.windows) * 2 * shape.kv_heads * shape.head_dim * itemsize


def fitting(shape: Shape, cells: Sequence[Cell], room: int, itemsize: int) -> list[Cell]:
    """Those whose cache, with `itemsize` bytes per number, fits into `room` bytes beside the weights."""
    block = BLOCK_SIZE * position_bytes(shape, itemsize)
    return [cell for cell in cells if weight_bytes(shape) + cell.blocks * block <= room]


def decode_bytes(shape: Shape, rows: int, context: float, itemsize: int) -> float:
    """What a decode step cannot avoid to move: weights once, the cache of `context` positions, one position more.

    Of the embedding it reads a row per sequence, unless the table is also the output's matrix. Activations, logits and
    sampling are left out: a share of the bandwidth that is computed from this is never too high.
    """
    weights = shape.layer_weights + shape.vocab * shape.hidden + rows * shape.hidden
    per_layer = position_bytes(shape, itemsize) / len(shape.windows)
    cached = sum(min(context, window or context) + 1 for window in shape.windows)
    return weights * WEIGHT_BYTES + rows * cached * per_layer


def attention_flops(shape: Shape, tokens: int) -> float:
    """Of one layer's causal attention over a prompt from its beginning: what the mask hides is not counted."""
    return 4.0 * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2


def prefill_flops(shape: Shape, tokens: int) -> float:
    """Of a prompt in one step: matrix products, attention without windows, and the logits of the last token."""
    products = 2.0 * tokens * shape.layer_weights + 2.0 * shape.vocab * shape.hidden
    return products + len(shape.windows) * attention_flops(shape, tokens)


def working_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end): the time in which there was something to do."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def load_bytes(shape: Shape, steps: int, lengths: Sequence[tuple[int, int]], itemsize: int) -> float:
    """What `steps` steps move at least that serve requests of (prompt, output) tokens: see `decode_bytes`.

    Every step reads the weights; the step of each output token but the first, which a prompt's step makes, reads the
    sequence so far.
    """
    read = sum((output - 1) * prompt + (output - 1) * (output - 2) // 2 for prompt, output in lengths)
    written = sum(prompt + output - 1 for prompt, output in lengths)
    return steps * decode_bytes(shape, 0, 0, itemsize) + (read + written) * position_bytes(shape, itemsize)
