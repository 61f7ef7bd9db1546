"""Several GPUs compute every family as one does; a rank that is lost or differs ends them all. One device at a time."""

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
import torch

from pagewire.services.executor import rank_processes
from pagewire.services.executor.devices.cuda.ranks import leader
from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.devices.ranks import followers
from pagewire.services.executor.devices.ranks.startup import Fingerprint, fingerprint_of
from pagewire.shared.errors import ConfigurationError, DeviceLost
from tests.services.executor.devices.cuda import test_drafts as drafts
from tests.services.executor.devices.cuda import test_grammar as grammar
from tests.services.executor.devices.cuda.ranks.several_gpus import PROMPT, opened, texts
from tests.services.executor.devices.cuda.twins import GREEDY, SLOTS, Host, batch_of, cpu_device
from tests.support.drafters import Scripted, guessing, knowing, wrong
from tests.support.interpreted import GPUS
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes without GPUs")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 3), ("qwen3", 2), ("mixtral", 2), ("qwen2-moe", 3), ("gemma3", 2), ("olmo2", 2), ("opt", 2)],
)
def test_tokens_of_each_family_equal_one_ranks(name: str, ranks: int) -> None:
    """The parts of three ranks differ in size. OLMo 2 norms the heads of all ranks together."""
    one = cpu_device(name)
    expected = Host(one, seed=1, preempt=0).run(texts(2, 20, 3))
    with closing(opened(name, ranks, one.capacity.num_blocks)) as ranked:
        assert Host(ranked, seed=2, preempt=0.15).run(texts(2, 20, 3)) == expected


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen2-moe", 2), *(pytest.param(*case, marks=pytest.mark.full) for case in (("mixtral", 2), ("qwen2-moe", 3)))],
)
def test_ranks_with_whole_experts_give_the_tokens_of_one(name: str, ranks: int) -> None:
    """Three ranks have 3, 3 and 2 of 8 experts. A shared one is cut as a dense layer."""
    one = cpu_device(name)
    expected = Host(one, seed=1, preempt=0).run(texts(2, 20, 3))
    with closing(opened(name, ranks, one.capacity.num_blocks, enable_expert_parallel=True)) as ranked:
        assert Host(ranked, seed=2, preempt=0.15).run(texts(2, 20, 3)) == expected


@pytest.mark.full
def test_grammars_are_known_to_rank_0_alone() -> None:
    expected, same = grammar.run(cpu_device("llama"))
    ranked, texts = grammar.run(opened())
    assert texts == same
    assert ranked.finishes == expected.finishes


@pytest.mark.full
@pytest.mark.parametrize("drafter", [knowing, wrong, guessing])
def test_drafted_tokens_change_nothing(drafter: Callable[[list[list[int]]], Scripted]) -> None:
    """In rows with penalties, bad words, log-probabilities and grammars."""
    drafts.check(drafter, opened(spec_type="suffix"))


def test_more_ranks_than_gpus_are_refused_with_the_count() -> None:
    with pytest.raises(ConfigurationError, match=f"needs {GPUS + 1} GPUs, and {GPUS} are visible"):
        opened(ranks=GPUS + 1)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", {"batch_invariant": True}),
        ("gpt-oss", {}),
    ],
)
def test_unsupported_settings_are_refused_before_a_rank_starts(
    name: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "take", pytest.fail)
    with pytest.raises(ConfigurationError, match="|".join(flags).replace("_", "-") or "tensor-parallel-size"):
        opened(name, **flags)


@pytest.mark.full
def test_a_rank_with_other_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> Fingerprint:
        return msgspec.structs.replace(fingerprint_of(*arguments), model_files="others")

    monkeypatch.setattr(f"{followers.__name__}.fingerprint_of", other)
    with pytest.raises(ConfigurationError, match="rank 1 differs from rank 0 in its model files"):
        opened()


def test_a_rank_that_never_arrives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_processes.COMMANDS, "cuda", ("sh", "-c", "exec sleep 1000"))
    monkeypatch.setattr(followers, "START_TIMEOUT", 0.5)
    with pytest.raises(DeviceLost, match="rank 1 has not arrived within"):
        opened()


def run_steps(device: Device) -> None:
    """Runs steps until one raises."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        device.launch(batch_of((0, 0, PROMPT, True))).wait()


@pytest.mark.parametrize("fault", [pytest.param(signal.SIGKILL, marks=pytest.mark.full), signal.SIGSTOP])
def test_a_lost_rank_ends_a_step(fault: signal.Signals) -> None:
    with closing(opened()) as device:
        lost = threading.Event()
        device.on_lost(lost.set)
        device.add(0, [9], GREEDY)
        timer = threading.Timer(0.2, os.kill, (device._followers.processes[0], fault))  # type: ignore[attr-defined]
        timer.start()
        with pytest.raises(DeviceLost):
            run_steps(device)
        assert lost.wait(PATIENCE)
        timer.join()


@pytest.mark.full
def test_rank_0_ends_that_does_not_notice_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that waits for that rank does not."""
    ended = threading.Event()
    monkeypatch.setattr(leader, "LOST_TIMEOUT", 0.5)
    monkeypatch.setattr(leader, "_end_process", ended.set)
    with closing(opened()) as device:
        os.kill(device._followers.processes[0], signal.SIGKILL)  # type: ignore[attr-defined]
        assert ended.wait(PATIENCE)
        assert device.lost


@pytest.mark.full
def test_a_rank_that_samples_other_tokens_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened()) as device:
        device.add(0, [9], GREEDY)
        monkeypatch.setattr(zlib, "crc32", lambda _: 1)  # of rank 0
        with pytest.raises(DeviceLost):
            run_steps(device)
        assert device.lost


@pytest.mark.full
def test_ranks_end_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "CLOSE_TIMEOUT", PATIENCE)
    device = opened()
    (process,) = device._followers._all  # type: ignore[attr-defined]
    device.close()
    assert process.process.returncode == 0


@pytest.mark.full
def test_a_rank_that_fails_ends_at_once() -> None:
    """A call that it does not have."""
    with closing(opened()) as device:
        lost = threading.Event()
        device.on_lost(lost.set)
        device._calls.send("extend", [SLOTS + 1], [0])  # type: ignore[attr-defined]
        assert lost.wait(PATIENCE)
