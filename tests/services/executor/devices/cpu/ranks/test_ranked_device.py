"""A device of several ranks, whose processes are real, answers as a device of one rank does, until a rank is lost."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pagewire.services.executor import rank_processes
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Device, Edits, PendingStep, StepBatch
from pagewire.services.executor.devices.ranks import followers
from pagewire.services.executor.devices.ranks.startup import Fingerprint, fingerprint_of
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.sampling_parameters import Record, record
from pagewire.shared.settings.config import load
from tests.support.checkpoints import VOCABULARY, checkpoint
from tests.support.waiting import PATIENCE

BLOCK = 8
ENTRIES = 8


def opened(ranks: int, folder: Path | None = None, **flags: Any) -> Device:
    sizes = {"max-num-seqs": 4, "block-size": BLOCK, "num-kv-blocks": 64, "dtype": "float32"}
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    return open_device(load(sizes | {"tensor-parallel-size": ranks} | flags, {}), folder or checkpoint("llama"))


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return tokens


def step(device: Device, *rows: tuple[int, int, list[int], bool], **columns: Any) -> PendingStep:
    """Rows of slot, first position, ids, and whether they sample."""
    pending = device.launch(
        StepBatch(
            np.array([slot for slot, _, _, _ in rows]),
            np.array([first for _, first, _, _ in rows]),
            np.array([len(ids) for _, _, ids, _ in rows]),
            np.array([token for _, _, ids, _ in rows for token in ids]),
            np.array([samples for _, _, _, samples in rows]),
            **columns,
        )
    )
    pending.wait()
    return pending


def add(device: Device, slot: int, sampling: Record | None = None, edits: Edits | None = None) -> None:
    windows = len(device.capacity.windows)
    blocks = range(slot * ENTRIES * windows, (slot + 1) * ENTRIES * windows)
    device.add(slot, list(blocks), record() if sampling is None else sampling, edits=edits)


def sampled(**columns: Any) -> Record:
    complete = record()
    for name, value in columns.items():
        complete[name] = value
    return complete


def run_steps(device: Device) -> None:
    """Runs steps until one raises."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        step(device, (0, 0, text(0, 40), True))


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Device]]:
    """With one rank, and with three."""
    with closing(opened(1)) as alone, closing(opened(3)) as ranked:
        yield [alone, ranked]


def outcomes(pending: PendingStep) -> list[Any]:
    """Everything that a step reports, as lists."""
    reports = [pending.logprobs, pending.prompt_logprobs, pending.candidates]
    columns = [{} if report is None else asdict(report) for report in reports]
    values = [np.round(np.asarray(one.pop(name, [])), 3).tolist() for one in columns for name in ("values", "logprobs")]
    return [pending.wait().tolist(), [{name: list(c) for name, c in one.items()} for one in columns], values]


def test_chunks_of_prompts_and_decodes_share_a_step(devices: list[Device]) -> None:
    results = []
    for device in devices:
        add(device, 0)
        add(device, 1)
        tokens = [outcomes(step(device, (0, 0, text(0, 20), True), (1, 0, text(1, 9), False)))]
        tokens.append(outcomes(step(device, (1, 9, text(2, 5), True), (0, 20, [7], True))))
        tokens += [outcomes(step(device, (0, 21 + i, [i], True), (1, 14 + i, [3 * i], True))) for i in range(6)]
        results.append(tokens)
    assert results[0] == results[1]


def test_ranks_sample_report_and_edit_like_one_rank(devices: list[Device]) -> None:
    edits = Edits(np.array([5, 9]), np.array([4.0, -4.0], np.float32), np.empty(0, np.int64), np.empty(0, np.int64),
                  penalized=False, num_prompt_tokens=6)  # fmt: skip
    results = []
    for device in devices:
        add(device, 0, sampled(temperature=0.8, top_p=0.9, key=11, num_logprobs=3))
        add(device, 1, sampled(num_candidates=4))
        add(device, 2, sampled(num_logprobs=2, num_prompt_logprobs=3))
        add(device, 3, edits=edits)
        prompts = [text(slot, 6) for slot in range(4)]
        following = np.array([-1] * 12 + [*prompts[2][1:], -1] + [-1] * 6)
        rows = [(slot, 0, prompts[slot], True) for slot in range(4)]
        results.append(outcomes(step(device, *rows, next_ids=following)))
    assert results[0] == results[1]
    assert results[0][1][0]["ids"]
    assert results[0][1][1]["ids"]
    assert results[0][1][2]["ids"]


def test_drafted_tokens_are_verified_as_by_one_rank(devices: list[Device]) -> None:
    results = []
    for device in devices:
        add(device, 0)
        prompt = text(5, 10)
        tokens: list[int] = []
        for _ in range(5):
            known = prompt + tokens
            tokens += (
                step(device, (0, max(0, len(known) - 1) if tokens else 0, known[-1:] if tokens else known, True))
                .wait()
                .tolist()
            )
        add(device, 1)
        right, wrong = prompt + tokens[:3], [*prompt, *tokens[:2], (tokens[2] + 1) % VOCABULARY]
        add(device, 2)
        rows = (1, 0, right, True), (2, 0, wrong, True)
        drafted = step(device, *rows, num_drafts=np.array([3, 3]))
        results.append((tokens, drafted.wait().tolist(), np.asarray(drafted.token_counts).tolist()))
    assert results[0] == results[1]
    assert results[0][2] == [4, 3]


def test_copied_blocks_are_copied_by_every_rank(devices: list[Device]) -> None:
    for device in devices:
        add(device, 0)
        add(device, 1)
        step(device, (0, 0, text(3, 20), False))
        device.copy(list(range(3)), [ENTRIES + entry for entry in range(3)])
        tokens = [step(device, (slot, 20, [4], True)).wait().tolist() for slot in (0, 1)]
        assert tokens[0] == tokens[1]


def test_appended_blocks_are_known_to_every_rank(devices: list[Device]) -> None:
    results = []
    for device in devices:
        device.add(0, [3], record())
        step(device, (0, 0, text(4, BLOCK), False))
        device.extend([0], [9])
        results.append(step(device, (0, BLOCK, [4], True)).wait().tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("fault", "reason"), [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 is silent")]
)
def test_a_lost_rank_is_noticed_without_a_step(fault: signal.Signals, reason: str) -> None:
    with closing(opened(2)) as device:
        lost, processes = threading.Event(), device._followers.processes  # type: ignore[attr-defined]
        device.on_lost(lost.set)
        add(device, 0)
        step(device, (0, 0, text(0, 9), True))
        os.kill(processes[0], fault)
        assert lost.wait(PATIENCE)
        assert device.lost == reason
        late = threading.Event()
        device.on_lost(late.set)
        assert late.is_set()
        with pytest.raises(DeviceLost):
            step(device, (0, 9, [1], True))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_a_step(fault: signal.Signals) -> None:
    with closing(opened(3)) as device:
        add(device, 0)
        timer = threading.Timer(0.2, os.kill, (device._followers.processes[1], fault))  # type: ignore[attr-defined]
        timer.start()
        with pytest.raises(DeviceLost):
            run_steps(device)
        timer.join()


def test_a_call_that_rank_0_does_not_end_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    device = opened(2)
    add(device, 0)
    monkeypatch.setattr(device._model.model, "forward", fail)  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        step(device, (0, 0, text(0, 9), True))
    assert not device.recovers
    (process,) = device._followers._all  # type: ignore[attr-defined]
    monkeypatch.setattr(followers, "CLOSE_TIMEOUT", PATIENCE)
    device.close()
    assert process.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_all_processes_leave_the_ranks_to_rank_0(devices: list[Device], number: signal.Signals) -> None:
    """As a terminal sends them: rank 0 drains."""
    ranked = devices[1]
    add(ranked, 0)
    for process in ranked._followers.processes:  # type: ignore[attr-defined]
        os.kill(process, number)
    step(ranked, (0, 0, text(0, 9), True))


def test_ranks_end_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "CLOSE_TIMEOUT", PATIENCE)
    device = opened(2)
    (process,) = device._followers._all  # type: ignore[attr-defined]
    device.close()
    assert process.process.returncode == 0


def test_a_rank_that_never_arrives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_processes.COMMANDS, "cpu", ("sh", "-c", "exec sleep 1000"))
    monkeypatch.setattr(followers, "START_TIMEOUT", 0.5)
    with pytest.raises(DeviceLost, match="rank 1 has not arrived within"):
        opened(2)


def test_a_rank_that_ends_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_processes.COMMANDS, "cpu", ("false",))
    with pytest.raises(DeviceLost, match="rank 1 has ended at the start"):
        opened(2)


def test_a_rank_with_other_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> Fingerprint:
        return msgspec.structs.replace(fingerprint_of(*arguments), model_files="others")

    monkeypatch.setattr(f"{followers.__name__}.fingerprint_of", other)
    with pytest.raises(ConfigurationError, match="rank 1 differs from rank 0 in its model files"):
        opened(2)
