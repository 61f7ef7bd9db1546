"""`--batch-invariant`: what is computed for a sequence is equal to the bit, whatever else is in its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import BLOCK_SIZE, GREEDY, batch_of, cuda_device
from tests.support.checkpoints import VOCABULARY

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
SAMPLED = record(temperature=0.9, top_p=0.95, key=sequence_key(3, 0, 0))
PROMPT = [7, 300, 41, 5, 88, 12, 450, 3, 77, 140, 9, 31, 256, 64, 2, 19, 500, 18]
DECODES = 2
RELATIVES = ["qwen3", "mistral", "opt"]
OTHERS = (0, 3)
"""Slots of the other sequences. One goes before the row that is watched, and one behind it."""


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own products are tested. Those of a CPU's libraries may depend on a row's place: others stand in."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(torch.nn.functional, "linear", product)
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def dot(_builder: Any, a: Any, b: Any, added: Any, *_how: Any) -> Any:
    """`tl.dot` of float32, each sum in the order of the inner dimension."""
    return type(added)((a.data[:, :, None] * b.data[None]).sum(axis=1) + added.data, added.dtype.scalar)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Its last bits follow the number of rows, like those of real products, but not a row's place."""
    pairs = list(zip(x.chunk(len(x), dim=1), weight.chunk(len(x), dim=1), strict=True))
    sums = sum(torch.stack([torch.mv(w, row.clone()) for row in part]) for part, w in pairs)
    assert isinstance(sums, Tensor)
    return sums if bias is None else sums + bias


@dataclass(slots=True)
class Made:
    """Everything that was computed for one sequence."""

    tokens: list[int]
    hidden: Tensor
    """[1 + DECODES, D] of the positions behind which a token was sampled."""
    logits: Tensor
    """[1 + DECODES, V] of the same."""
    cached: Tensor
    """[layers, keys and values, Hkv, positions, d]."""


def run(device: CudaDevice, chunks: Sequence[int], others: Sequence[tuple[int, int]], blocks: Sequence[int]) -> Made:
    """`PROMPT` in `chunks`, then decodes, in slot 1. `others` are the query_lens of the other rows, step by step."""
    assert sum(chunks) == len(PROMPT)
    seen: list[tuple[Tensor, Tensor]] = []
    plain = device._model.logits

    def kept(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        result = plain(hidden, out)
        seen.append((hidden.clone(), result.clone()))  # what follows edits logits
        return result

    device._model.logits = kept  # type: ignore[method-assign]
    device.add(1, blocks, SAMPLED)
    done = dict.fromkeys(OTHERS, 0)
    for slot, block in zip(OTHERS, (30, 35), strict=True):
        device.add(slot, range(block, block + 3), GREEDY)
    text, start = list(PROMPT), 0
    tensors: list[tuple[Tensor, Tensor]] = []
    for step, width in enumerate([*chunks, *[1] * DECODES]):
        samples = start + width == len(text)
        rows = {1: (1, start, text[start : start + width], samples)}
        for slot, count in zip(OTHERS, others[step % len(others)], strict=True):
            if count:
                first = done[slot]
                rows[slot] = (slot, first, [(slot + 5 * p) % VOCABULARY for p in range(first, first + count)], False)
                done[slot] += count
        order = sorted(rows)
        place = order.index(1)
        token = device.launch(batch_of(*(rows[slot] for slot in order))).wait()[place]
        start += width
        if samples:
            text.append(int(token))
            hidden, logits = seen[-1]
            tensors.append((hidden[place], logits[place]))
    device._model.logits = plain  # type: ignore[method-assign]
    entries = [(keys[list(blocks)], values[list(blocks)]) for keys, values in device._pool.caches]
    cached = torch.stack([torch.stack(pair) for pair in entries]).transpose(2, 3).flatten(3, 4)[..., :start, :]
    return Made(
        text, torch.stack([hidden for hidden, _ in tensors]), torch.stack([rows for _, rows in tensors]), cached
    )


def assert_equal(one: Made, other: Made) -> None:
    assert one.tokens == other.tokens
    assert torch.equal(one.cached, other.cached)
    assert torch.equal(one.hidden, other.hidden)
    assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in RELATIVES)])
def test_a_sequence_has_the_same_bits_alone_among_others_and_in_any_chunks(name: str) -> None:
    device = cuda_device(name, batch_invariant=True, captured=False)  # what runs as a graph calls no `logits`
    alone = run(device, [8, 8, 2], [(0, 0)], [4, 5])
    assert alone.logits.isfinite().all()
    assert len(alone.tokens) == len(PROMPT) + 1 + DECODES > BLOCK_SIZE
    assert_equal(run(device, [4, 5, 6, 1, 2], [(2, 1), (1, 2), (0, 2), (3, 4)], [17, 2]), alone)
    assert_equal(run(device, [8, 8, 2], [(0, 0), (0, 0), (1, 5), (7, 0), (0, 7)], [9, 10]), alone)


@pytest.mark.full
def test_a_sequence_with_an_fp8_cache_has_the_same_bits_among_others() -> None:
    device = cuda_device("llama", batch_invariant=True, captured=False, cached=torch.float8_e4m3fn)
    alone = run(device, [8, 8, 2], [(0, 0)], [4, 5])
    among = run(device, [4, 5, 6, 1, 2], [(2, 1), (1, 2), (0, 2), (3, 4)], [17, 2])
    alone.cached, among.cached = alone.cached.view(torch.uint8), among.cached.view(torch.uint8)
    assert_equal(among, alone)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may use one kernel for all shapes of a tiny model")
def test_bits_differ_without_batch_invariance() -> None:
    """The values that the tests above compare can differ."""
    device = cuda_device("llama", captured=False)
    alone = run(device, [8, 8, 2], [(0, 0)], [4, 5])
    among = run(device, [4, 5, 6, 1, 2], [(2, 1), (1, 2), (0, 2), (3, 4)], [17, 2])
    torch.testing.assert_close(among.logits, alone.logits)
    assert not torch.equal(among.logits, alone.logits)
