"""Two GPUs make the tokens of one, whatever a step has."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
import torch

from pagewire.services.executor.devices.protocol import Device, Edits, Logprobs
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.ranks.several_gpus import PROMPT, opened, texts
from tests.services.executor.devices.cuda.twins import GREEDY, Host, Text, batch_of, cpu_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes without GPUs")


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """The first two of the GPUs, with llama."""
    with closing(opened(spec_type="suffix")) as ranked:
        yield ranked


def test_tokens_equal_one_ranks(device: Device) -> None:
    expected = Host(cpu_device("llama"), seed=1, preempt=0).run(texts(2, 20, 3))
    assert Host(device, seed=2, preempt=0.15).run(texts(2, 20, 3)) == expected


def test_steps_are_launched_before_tokens_are_known(device: Device) -> None:
    (expected,) = Host(cpu_device("llama"), seed=0, preempt=0).run([Text(list(PROMPT), len(PROMPT) + 4)])
    device.add(2, [9], GREEDY)
    pending = [device.launch(batch_of((2, 0, PROMPT, True)))]
    tokens: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + 3):
        pending.append(device.launch(batch_of((2, position, [0], True))))
        tokens += pending.pop(0).wait().tolist()
    assert PROMPT + tokens + pending[0].wait().tolist() == expected


def test_drafts_are_kept_up_to_the_first_that_one_rank_does_not_sample(device: Device) -> None:
    (text,) = Host(cpu_device("llama"), seed=0, preempt=0).run([Text(list(PROMPT), len(PROMPT) + 4)])
    known, following = text[: len(PROMPT)], text[len(PROMPT) :]
    drafted = [*following[:2], following[2] + 1]
    device.add(3, [9], GREEDY)
    batch = batch_of((3, 0, [*known, *drafted], True))
    pending = device.launch(msgspec.structs.replace(batch, num_drafts=np.array([len(drafted)])))
    assert pending.wait().tolist() == following[:3]
    assert device.launch(batch_of((3, len(known) + 2, [following[2]], True))).wait().tolist() == following[3:]


def test_reports_and_edits_equal_one_ranks(device: Device) -> None:
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
    candidates = []
    for one in (cpu_device("llama"), device):
        one.add(0, [9], sampling, (), edits)
        one.add(1, [3], record(num_candidates=3))
        pending = one.launch(
            batch_of((0, 0, PROMPT, True), (1, 0, PROMPT, True), next_ids=[*PROMPT[1:], -1, *[-1] * len(PROMPT)])
        )
        pending.wait()
        reports.append([pending.logprobs, pending.prompt_logprobs])
        assert pending.candidates is not None
        candidates.append(pending.candidates.ids.tolist())
    assert candidates[0] == candidates[1]
    for report, same in zip(*reports, strict=True):
        assert report is not None
        assert same is not None
        np.testing.assert_allclose(same.values, report.values, atol=1e-4)
        columns, others = asdict(report), asdict(same)
        assert all(columns[name].tolist() == others[name].tolist() for name in columns if name != "values")


def test_copied_blocks_are_copied_by_every_rank(device: Device) -> None:
    device.add(0, [4, 5], GREEDY)
    device.launch(batch_of((0, 0, range(10), False))).wait()
    device.copy([4], [6])
    device.add(1, [6, 7], GREEDY)
    first, copied = (device.launch(batch_of((slot, 10, [4], True))).wait().tolist() for slot in (0, 1))
    assert first == copied
