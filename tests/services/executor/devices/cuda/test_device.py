"""The GPU device makes the tokens of the CPU device, to the last one, whatever batches, blocks and slots it gets."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pagewire.services.executor.devices.cuda.tables import NUM_CHECKED_STOP_IDS
from pagewire.services.executor.sampling import sequence_key
from pagewire.shared.sampling import NOT_FINITE, record
from tests.services.executor.devices.cuda.twins import (
    BLOCK_SIZE,
    GREEDY,
    Host,
    Text,
    batch_of,
    cpu_device,
    cuda_device,
)
from tests.support.checkpoints import VOCABULARY

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
FAMILIES = ["llama", "qwen3", "mistral", "opt"]
FILTERS: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 50}]
PROMPT = [7, 300, 41, 5, 88]


def texts(seed: int, count: int = 2, longest: int = 26, most: int = 2) -> list[Text]:
    """Every other one is sampled, with filters of all kinds."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(longest // 3, longest) if index else longest)]
        key = sequence_key(seed, index, 0)
        sampled = record(temperature=rng.choice([0.7, 1.0]), key=key, **rng.choice(FILTERS))
        found.append(Text(ids, len(ids) + rng.randint(most // 2 + 1, most), sampled if index % 2 else GREEDY))
    return found


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "opt"))]
)
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    expected = Host(cpu_device(name), seed=1, preempt=0).run(texts(1))
    assert Host(cuda_device(name, captured=False), seed=2, preempt=0.15).run(texts(1)) == expected


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*FAMILIES, "qwen2-sliding", "llama-yarn", "llama-biased", "opt-post-norm"])
def test_tokens_are_those_of_the_cpu_in_longer_runs(name: str, seed: int) -> None:
    expected = Host(cpu_device(name), seed, preempt=0).run(texts(seed, 8, 60, 12))
    assert Host(cuda_device(name), seed + 1).run(texts(seed, 8, 60, 12)) == expected


def continuation(count: int, stop_ids: Sequence[int] = (), **columns: float) -> list[int]:
    """What the CPU makes of `PROMPT`."""
    text = Text(list(PROMPT), len(PROMPT) + count, record(**columns), stop_ids)
    return Host(cpu_device("llama"), seed=0, preempt=0).run([text])[0][len(PROMPT) :]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known() -> None:
    expected = continuation(4)
    device = cuda_device("llama", captured=False)
    device.add(2, [9], GREEDY)
    pending = [device.launch(batch_of((2, 0, PROMPT, True)))]
    found = []
    for position in range(len(PROMPT), len(PROMPT) + 3):
        pending.append(device.launch(batch_of((2, position, [0], True))))
        found += pending.pop(0).wait().tolist()
    assert found + pending[0].wait().tolist() == expected
    assert device.busy > 0


def test_a_row_behind_the_end_of_its_sequence_is_dead() -> None:
    expected = continuation(2)
    device = cuda_device("llama", captured=False)
    device.add(0, [9], GREEDY, [expected[0]])
    device.add(1, [3], GREEDY)
    first = device.launch(batch_of((0, 0, PROMPT, True), (1, 0, PROMPT, True)))
    second = device.launch(batch_of((0, len(PROMPT), [0], True), (1, len(PROMPT), [0], True)))
    assert first.wait().tolist() == [expected[0], expected[0]]
    assert second.wait().tolist() == [-1, expected[1]]


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    broken = 300
    prompt = [7, 41, 5, 88]
    alone = cuda_device("llama", captured=False)
    alone.add(1, [3], GREEDY)
    expected = alone.launch(batch_of((1, 0, prompt, True))).wait().tolist()
    device = cuda_device("llama", captured=False)
    with torch.no_grad():
        device._model.embedding[broken] = torch.nan
    device.add(0, [9], GREEDY)
    device.add(1, [3], GREEDY)
    first = device.launch(batch_of((0, 0, [*prompt, broken], True), (1, 0, prompt, True)))
    second = device.launch(batch_of((0, 5, [0], True), (1, 4, [0], True)))
    assert first.wait().tolist() == [NOT_FINITE, *expected]
    dead, alive = second.wait().tolist()
    assert dead == -1
    assert alive >= 0
    device.add(0, [9], GREEDY)
    assert device.launch(batch_of((0, 0, prompt, True))).wait().tolist() == expected, "of a block that held NaN"


def test_a_slot_comes_to_life_again_with_a_new_sequence_and_its_own_stop_ids() -> None:
    expected = continuation(2)
    device = cuda_device("llama", captured=False)
    device.add(0, [9], GREEDY, range(NUM_CHECKED_STOP_IDS + 3))
    device.remove(0)
    device.add(0, [4], record(min_length=len(PROMPT)), [expected[0]])
    assert device.launch(batch_of((0, 0, PROMPT, True))).wait().tolist() == expected[:1]
    device.remove(0)
    device.add(0, [5], GREEDY)
    assert device.launch(batch_of((0, 0, PROMPT, True))).wait().tolist() == expected[:1]
    assert device.launch(batch_of((0, len(PROMPT), expected[:1], True))).wait().tolist() == expected[1:]


def test_stop_ids_wait_for_the_minimum_length() -> None:
    (free,) = continuation(1)
    min_length = len(PROMPT) + 1
    (held,) = continuation(1, stop_ids=[free], min_length=min_length)
    device = cuda_device("llama", captured=False)
    device.add(0, [9], record(min_length=min_length), [free])
    assert device.launch(batch_of((0, 0, PROMPT, True))).wait().tolist() == [held] != [free]


def test_a_shared_prefix_is_read_from_the_blocks_of_another_slot() -> None:
    prompt = (PROMPT * 4)[: BLOCK_SIZE + 3]
    device = cuda_device("llama", captured=False)
    device.add(0, [9, 2], GREEDY)
    expected = device.launch(batch_of((0, 0, prompt, True))).wait().tolist()
    device.add(3, [9], GREEDY)
    device.extend([3], [7])
    assert device.launch(batch_of((3, BLOCK_SIZE, prompt[BLOCK_SIZE:], True))).wait().tolist() == expected


def test_a_captured_step_makes_what_its_kernels_make_one_by_one() -> None:
    """A decode and a mixed step, both with padding."""
    query_lens = [(1, 1, 1), (1, 2)]
    results = []
    for captured in (True, False):
        device = cuda_device("llama", captured=captured)
        for slot in range(3):
            device.add(slot, [slot * 2, slot * 2 + 1], GREEDY)
        starts, found = [0, 0, 0], []
        for row in query_lens:
            rows = [(slot, starts[slot], range(slot, slot + width), False) for slot, width in enumerate(row)]
            assert set(device.launch(batch_of(*rows)).wait()) == {-1}
            starts = [start + width for start, width in zip(starts, (*row, 0, 0), strict=False)]
        found += device.launch(batch_of(*((slot, starts[slot], [slot], True) for slot in range(3)))).wait().tolist()
        results.append(found)
        device.close()
    assert results[0] == results[1]
