"""The GPU device makes the tokens of the CPU device, to the last one, whatever batches, blocks and slots it gets."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.kernels.triton.sampling.sampling_columns import CHECKED_STOP_IDS
from pagewire.services.executor.devices.protocol import Edits, Logprobs
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.shared.sampling_parameters import NOT_FINITE, record
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
    tokens = []
    for index in range(count):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(longest // 3, longest) if index else longest)]
        key = sequence_key(seed, index, 0)
        sampled = record(temperature=rng.choice([0.7, 1.0]), key=key, **rng.choice(FILTERS))
        tokens.append(Text(ids, len(ids) + rng.randint(most // 2 + 1, most), sampled if index % 2 else GREEDY))
    return tokens


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                "mistral",
                "opt",
                "qwen3",
                "gpt-neox",
                "gpt-oss",
                "gpt2",
                "gemma3",
                "phi3",
                "smollm3",
                "olmo2",
                "qwen2-moe",
            )
        ),
    ],
)
def test_tokens_equal_the_cpus(name: str) -> None:
    expected = Host(cpu_device(name), seed=1, preempt=0).run(texts(1))
    assert Host(cuda_device(name, captured=False), seed=2, preempt=0.15).run(texts(1)) == expected


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*FAMILIES, "qwen2-sliding", "llama-yarn", "llama-biased", "opt-post-norm"])
def test_tokens_equal_the_cpus_in_longer_runs(name: str, seed: int) -> None:
    expected = Host(cpu_device(name), seed, preempt=0).run(texts(seed, 8, 60, 12))
    assert Host(cuda_device(name), seed + 1).run(texts(seed, 8, 60, 12)) == expected


def continuation(count: int, stop_ids: Sequence[int] = (), **columns: float) -> list[int]:
    """The tokens that the CPU samples behind `PROMPT`."""
    text = Text(list(PROMPT), len(PROMPT) + count, record(**columns), stop_ids)
    return Host(cpu_device("llama"), seed=0, preempt=0).run([text])[0][len(PROMPT) :]


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known() -> None:
    expected = continuation(4)
    device = cuda_device("llama", captured=False)
    device.add(2, [9], GREEDY)
    pending = [device.launch(batch_of((2, 0, PROMPT, True)))]
    tokens = []
    for position in range(len(PROMPT), len(PROMPT) + 3):
        pending.append(device.launch(batch_of((2, position, [0], True))))
        tokens += pending.pop(0).wait().tolist()
    assert tokens + pending[0].wait().tolist() == expected
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
    device.add(0, [9], GREEDY, range(CHECKED_STOP_IDS + 3))
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


@pytest.mark.full
def test_a_captured_step_equals_its_kernels_one_by_one() -> None:
    """A decode and a mixed step, both with padding."""
    query_lens = [(1, 1, 1), (1, 2)]
    results = []
    for captured in (True, False):
        device = cuda_device("llama", captured=captured)
        for slot in range(3):
            device.add(slot, [slot * 2, slot * 2 + 1], GREEDY)
        starts, sampled = [0, 0, 0], []
        for row in query_lens:
            rows = [(slot, starts[slot], range(slot, slot + width), False) for slot, width in enumerate(row)]
            assert set(device.launch(batch_of(*rows)).wait()) == {-1}
            starts = [start + width for start, width in zip(starts, (*row, 0, 0), strict=False)]
        sampled += device.launch(batch_of(*((slot, starts[slot], [slot], True) for slot in range(3)))).wait().tolist()
        results.append(sampled)
        device.close()
    assert results[0] == results[1]


def test_log_probabilities_equal_the_cpus() -> None:
    """Prompts come in chunks, and the logits of sampled tokens are edited in place too."""
    edits = Edits(
        bias_ids=np.array([9]),
        biases=np.array([50.0], np.float32),
        allowed_ids=np.empty(0, np.int64),
        bad_words=np.array([1, 11]),
        penalized=True,
        num_prompt_tokens=len(PROMPT),
        tokens=np.array(PROMPT),
    )
    sampling = record(num_logprobs=4, num_prompt_logprobs=3, repetition_penalty=1.5)
    reports: list[list[Logprobs | None]] = []
    for device in (cpu_device("llama"), cuda_device("llama", captured=False)):
        device.add(0, [9], sampling, (), edits)
        device.add(1, [3], record(num_logprobs=1))
        steps = []
        for batch in (
            batch_of((0, 0, PROMPT[:2], False), (1, 0, PROMPT, True), next_ids=[*PROMPT[1:3], *[-1] * len(PROMPT)]),
            batch_of((0, 2, PROMPT[2:], True), next_ids=[*PROMPT[3:], -1]),
        ):
            pending = device.launch(batch)
            pending.wait()
            steps += [pending.logprobs, pending.prompt_logprobs]
        reports.append(steps)
    for cpu, cuda in zip(*reports, strict=True):
        assert (cpu is None) == (cuda is None)
        if cpu is not None and cuda is not None:
            np.testing.assert_allclose(cuda.values, cpu.values, atol=1e-4)
            for name in ("rows", "positions", "counts", "ids", "ranks"):
                assert getattr(cpu, name).tolist() == getattr(cuda, name).tolist(), name
    assert [part is None for part in reports[0]] == [False, False, False, False]


def test_edited_tokens_equal_the_cpus() -> None:
    """With preemptions, after which counts and history come from the tokens."""
    sampling = record(temperature=0.8, key=5, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.25)

    def text() -> list[Text]:
        edits = Edits(
            bias_ids=np.array([9, 300]),
            biases=np.array([5.0, -3.0], np.float32),
            allowed_ids=np.arange(400),
            bad_words=np.array([1, 11, 2, 9, 9]),
            penalized=True,
            num_prompt_tokens=len(PROMPT),
        )
        return [Text(list(PROMPT), len(PROMPT) + 5, sampling, (), edits)]

    expected = Host(cpu_device("llama"), seed=1, preempt=0).run(text())
    assert Host(cuda_device("llama", captured=False), seed=2, preempt=0.3).run(text()) == expected


def test_penalties_of_a_sequence_that_never_ran_are_not_those_of_the_next_one() -> None:
    device = cuda_device("llama", captured=False)
    nothing = np.empty(0, np.int64)
    for tokens in ([5, 6], [7]):
        edits = Edits(
            bias_ids=nothing,
            biases=np.empty(0, np.float32),
            allowed_ids=nothing,
            bad_words=nothing,
            penalized=True,
            num_prompt_tokens=len(tokens),
            tokens=np.array(tokens),
        )
        device.add(0, [3], record(repetition_penalty=1.5), (), edits)
        device.remove(0)
    device.launch(batch_of((0, 0, [7], True))).wait()
    seen = device._tables.sampling.seen[0]
    assert seen[7]
    assert not seen[[5, 6]].any()
    device.close()


def test_all_graphs_share_the_memory_of_the_logits() -> None:
    """With a large vocabulary, logits of their own would take gigabytes."""
    device = cuda_device("llama")
    samplers = [sampler for sampler, _ in device._samplers.values()]
    assert len(samplers) > 2
    assert len({sampler.logits.data_ptr() for sampler in samplers}) == 1


@pytest.mark.parametrize(
    "captured",
    [
        False,
        pytest.param(
            True,
            marks=[pytest.mark.full, pytest.mark.skipif(torch.cuda.is_available(), reason="a graph calls no Python")],
        ),
    ],
)
def test_a_mixed_step_makes_logits_of_its_rows_only(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward is in a bucket for rows of every slot."""
    device = cuda_device("llama", captured=captured)
    plain, sizes = device._model.logits, []

    def counted(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(hidden, out)

    monkeypatch.setattr(device._model, "logits", counted)
    for slot in range(2):
        device.add(slot, [slot * 2], GREEDY)
    device.launch(batch_of((0, 0, PROMPT[:2], True), (1, 0, PROMPT, True))).wait()
    assert sizes == [2] != [device.capacity.max_num_seqs]
