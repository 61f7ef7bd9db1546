"""The CPU device: whatever blocks, neighbours and chunks a sequence gets, it computes the same."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.devices.cpu.compiled_model import Linear
from pagewire.services.executor.devices.cpu.device import multiplies_bf16
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.shared.sampling_parameters import record
from tests.support.checkpoints import VOCABULARY, checkpoint, reference_logits
from tests.support.device import BLOCK_SIZE, GREEDY, Driver, Row

NAMES = ["llama", "mistral", "qwen2-sliding"]


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_batch_equals_one_by_one(name: str) -> None:
    lengths = [1, 30, 9, 64, 17, 2, 100]
    query_lens = [1, 1, 9, 20, 1, 2, 1]
    texts = [text(seed, length) for seed, length in enumerate(lengths)]
    driver = Driver(checkpoint(name))
    for slot, ids in enumerate(texts):
        driver.add(slot, len(ids))
        if head := ids[: len(ids) - query_lens[slot]]:
            driver.step(Row(slot, 0, head, samples=False))
    starts = [length - width for length, width in zip(lengths, query_lens, strict=True)]
    driver.step(*(Row(slot, start, texts[slot][start:]) for slot, start in enumerate(starts)))
    for slot, ids in enumerate(texts):
        expected = reference_logits(checkpoint(name), ids)[-1]
        torch.testing.assert_close(driver.logits[slot], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_any_schedule_gives_the_same_logits(data: st.DataObject, name: str) -> None:
    """Rows of random width, in random order, sampling or not, until every text is through."""
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    texts = [text(10 + slot, length) for slot, length in enumerate(lengths)]
    expected = [reference_logits(checkpoint(name), ids) for ids in texts]
    driver = Driver(checkpoint(name))
    for slot, length in enumerate(lengths):
        driver.add(slot, length)
    done = [0] * len(texts)
    while open_slots := [slot for slot, ids in enumerate(texts) if done[slot] < len(ids)]:
        slots = data.draw(st.permutations(open_slots))[: data.draw(st.integers(1, len(open_slots)))]
        rows = []
        for slot in slots:
            width = data.draw(st.integers(1, len(texts[slot]) - done[slot]))
            rows.append(Row(slot, done[slot], texts[slot][done[slot] : done[slot] + width], data.draw(st.booleans())))
            done[slot] += width
        tokens = driver.step(*rows)
        assert [token >= 0 for token in tokens] == [row.samples for row in rows]
        sampling = [row for row in rows if row.samples]
        for row, logits in zip(sampling, driver.logits if sampling else (), strict=True):
            last = expected[row.slot][row.start + len(row.ids) - 1]
            torch.testing.assert_close(logits, last, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_is_read_from_the_blocks_of_another_slot() -> None:
    driver = Driver(checkpoint("llama"))
    prefix, one, two = text(1, 3 * BLOCK_SIZE), text(2, 10), text(3, 5)
    blocks = driver.add(0, 40)
    driver.step(Row(0, 0, prefix + one))
    driver.device.add(1, blocks[:3], GREEDY)
    driver.device.extend([1], [200])
    driver.step(Row(1, len(prefix), two))
    expected = reference_logits(checkpoint("llama"), prefix + two)[-1]
    torch.testing.assert_close(driver.logits[0], expected, rtol=1e-4, atol=1e-4)


def test_blocks_come_one_by_one_and_to_several_slots_at_once() -> None:
    driver = Driver(checkpoint("llama"))
    ids = text(4, 3 * BLOCK_SIZE)
    driver.device.add(0, [9], GREEDY)
    driver.device.add(5, [3], GREEDY)
    driver.device.extend([5, 0, 0, 5], [7, 1, 8, 2])
    driver.step(Row(0, 0, ids), Row(5, 0, ids[::-1]))
    for row, tokens in enumerate((ids, ids[::-1])):
        expected = reference_logits(checkpoint("llama"), tokens)[-1]
        torch.testing.assert_close(driver.logits[row], expected, rtol=1e-4, atol=1e-4)


def test_a_slot_and_its_blocks_serve_the_next_sequence() -> None:
    driver = Driver(checkpoint("llama"))
    blocks = driver.add(0, 48)
    first = driver.generate(0, text(5, 30), 10)
    driver.device.remove(0)
    driver.device.add(0, blocks[::-1], GREEDY)
    driver.generate(0, text(6, 9), 4)
    driver.device.remove(0)
    driver.device.add(0, blocks, GREEDY)
    assert driver.generate(0, text(5, 30), 10) == first


def test_overflow_in_half_precision_does_not_poison_the_blocks() -> None:
    driver = Driver(checkpoint("llama"), dtype="float16")
    projection: Any = driver.model.get_submodule("model.layers.0.self_attn.qkv")
    weight = projection.weights.tensors[0] if isinstance(projection, Linear) else projection.weight
    healthy = weight.clone()
    blocks = driver.add(0, 2 * BLOCK_SIZE)
    weight.fill_(60_000)
    driver.step(Row(0, 0, text(7, 2 * BLOCK_SIZE)))
    assert not driver.logits.isfinite().all()
    weight.copy_(healthy)
    driver.device.remove(0)
    driver.device.add(0, blocks, GREEDY)
    driver.step(Row(0, 0, text(8, 3)))
    assert driver.logits.isfinite().all()


def test_sampled_tokens_depend_on_the_key_and_the_position_alone() -> None:
    def generate(slot: int, seed: int, chunk: int) -> list[int]:
        driver = Driver(checkpoint("llama"))
        sampling = record(temperature=1.0, top_p=0.95, key=sequence_key(seed, 0, 0))
        driver.add(slot, 60, sampling)
        return driver.generate(slot, text(9, 20), 30, chunk)

    assert generate(slot=0, seed=1, chunk=20) == generate(slot=6, seed=1, chunk=3)
    assert generate(slot=0, seed=1, chunk=20) != generate(slot=0, seed=2, chunk=20)


def test_a_recomputed_sequence_goes_on_with_the_same_tokens() -> None:
    driver = Driver(checkpoint("llama"))
    sampling = record(temperature=1.0, key=11)
    driver.add(0, 60, sampling)
    tokens = driver.generate(0, text(9, 20), 30)
    driver.add(1, 60, sampling)
    assert driver.generate(1, text(9, 20) + tokens[:12], 18) == tokens[12:]


def test_stop_ids_wait_for_the_minimum_length() -> None:
    driver = Driver(checkpoint("llama"))
    driver.add(0, 40)
    free = driver.generate(0, text(1, 10), 12)
    forbidden = (free[0], free[5], free[11])
    driver.add(1, 40, record(min_length=10 + 6), forbidden)
    held = driver.generate(1, text(1, 10), 12)
    assert not set(held[:6]) & set(forbidden)
    driver.add(2, 40, record(min_length=10), forbidden)
    assert driver.generate(2, text(1, 10), 12) == free


def test_greedy_and_sampled_rows_share_a_step() -> None:
    driver = Driver(checkpoint("llama"))
    ids = text(1, 12)
    for slot in range(8):
        driver.add(slot, 16, GREEDY if slot % 2 else record(temperature=3.0, key=slot))
    tokens = driver.step(*(Row(slot, 0, ids) for slot in range(8)))
    best = int(reference_logits(checkpoint("llama"), ids)[-1].argmax())
    assert [token == best for token in tokens[1::2]] == [True] * 4
    assert len(set(tokens[::2])) > 1


def test_a_step_without_sampling_returns_no_token() -> None:
    driver = Driver(checkpoint("llama"))
    driver.add(0, 16)
    assert driver.step(Row(0, 0, text(1, 8), samples=False)) == [-1]
    assert driver.device.capacity.vocab_size == VOCABULARY


def test_close_gives_the_memory_back() -> None:
    driver = Driver(checkpoint("llama"))
    device, weights = driver.device, weakref.ref(driver.model)
    driver.add(0, 16)
    driver.step(Row(0, 0, text(1, 8)))
    del driver
    gc.collect()
    assert weights() is not None
    device.close()
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize(
    ("flags", "support"),
    [
        ("flags : avx2 avx512f", False),
        ("flags : avx512f avx512_bf16", True),
        ("flags : avx512_bf16 amx_bf16 amx_tile", True),
        ("Features : asimd i8mm bf16", True),
    ],
)
def test_bf16_is_looked_up_among_the_flags_of_the_cpu(tmp_path: Path, flags: str, support: bool) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    assert multiplies_bf16(tmp_path / "cpuinfo") is support
    assert not multiplies_bf16(tmp_path / "nothing")


def test_a_copied_block_is_read_like_the_one_it_was_copied_from() -> None:
    """Copy-on-write: two texts share a full block, and what they have in common of the next one is copied."""
    driver = Driver(checkpoint("llama"))
    prefix, one, two = text(1, BLOCK_SIZE + 3), text(2, 4), text(3, 4)
    blocks = driver.add(0, 2 * BLOCK_SIZE)
    driver.step(Row(0, 0, prefix, samples=False))
    driver.device.copy([blocks[1], blocks[0]], [200, 201])
    driver.device.add(1, [blocks[0], 200], GREEDY)
    driver.device.add(2, [201, blocks[1]], GREEDY)  # goes on in the block itself
    driver.device.remove(0)
    driver.step(Row(1, len(prefix), one), Row(2, len(prefix), two))
    for row, tail in enumerate((one, two)):
        expected = reference_logits(checkpoint("llama"), prefix + tail)[-1]
        torch.testing.assert_close(driver.logits[row], expected, rtol=1e-4, atol=1e-4)


def test_candidates_are_reported_of_the_rows_that_ask_for_them() -> None:
    driver = Driver(checkpoint("llama"))
    texts = [text(seed, 5) for seed in range(4)]
    asking = record(num_candidates=6)
    drawing = record(temperature=1.0, key=sequence_key(1, 0, 0))
    for slot, sampling in enumerate((drawing, asking, asking, record(num_candidates=2))):
        driver.add(slot, 16, sampling)
    pending = driver.launch(*(Row(slot, 0, ids, samples=slot != 2) for slot, ids in enumerate(texts)))
    tokens, candidates = pending.wait(), pending.candidates
    assert candidates is not None
    assert candidates.rows.tolist() == [1, 3]
    assert candidates.counts.tolist() == [6, 2]
    assert candidates.ids[[0, 6]].tolist() == tokens[[1, 3]].tolist()
    for ids, begin, end in ((texts[1], 0, 6), (texts[3], 6, 8)):
        best = torch.log_softmax(reference_logits(checkpoint("llama"), ids)[-1], dim=0).topk(end - begin)
        assert candidates.ids[begin:end].tolist() == best.indices.tolist()
        torch.testing.assert_close(torch.from_numpy(candidates.logprobs[begin:end]), best.values, rtol=1e-4, atol=1e-4)


def test_candidates_are_reported_on_request_alone() -> None:
    driver = Driver(checkpoint("llama"))
    driver.add(0, 8, record(num_candidates=4))
    driver.add(1, 8)
    assert driver.launch(Row(0, 0, [1, 2], samples=False), Row(1, 0, [3])).candidates is None
    driver.device.remove(0)
    driver.device.add(0, [9], GREEDY)
    assert driver.launch(Row(0, 0, [1, 2])).candidates is None
