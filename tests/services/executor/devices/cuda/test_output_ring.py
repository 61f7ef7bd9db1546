"""Tokens of steps in flight keep apart, and steps are waited for in order."""

import pytest
import torch

from pagewire.services.executor.devices.cuda.output_ring import OutputRing
from tests.services.executor.devices.cuda.late import LateRuntime


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_later_step_does_not_change_the_tokens_of_an_earlier_one() -> None:
    runtime = LateRuntime()
    ring, tokens = OutputRing(runtime, depth=2, places=3), int32(1, 2, 3)
    for round_ in range(5):
        tokens.copy_(int32(1, 2, 3) + round_)
        first = ring.send(tokens, runtime.mark())
        tokens.fill_(-1)
        second = ring.send(tokens[:2], runtime.mark())
        assert first.wait().tolist() == [1 + round_, 2 + round_, 3 + round_]
        assert second.wait().tolist() == [-1, -1]


def test_a_result_stays_as_it_is_when_its_place_is_taken_again() -> None:
    runtime = LateRuntime()
    ring = OutputRing(runtime, depth=1, places=1)
    kept = ring.send(int32(5), runtime.mark()).wait()
    ring.send(int32(6), runtime.mark()).wait()
    assert kept.tolist() == [5]


def test_no_more_steps_than_places_are_in_flight() -> None:
    runtime = LateRuntime()
    ring = OutputRing(runtime, depth=2, places=1)
    pending = [ring.send(int32(token), runtime.mark()) for token in (1, 2)]
    with pytest.raises(RuntimeError, match="in flight"):
        ring.send(int32(3), runtime.mark())
    pending[0].wait()
    assert ring.send(int32(3), runtime.mark()) is not None


def test_steps_are_waited_for_once_and_in_order() -> None:
    runtime = LateRuntime()
    ring = OutputRing(runtime, depth=2, places=1)
    first, second = (ring.send(int32(token), runtime.mark()) for token in (1, 2))
    with pytest.raises(RuntimeError, match="in order"):
        second.wait()
    first.wait()
    with pytest.raises(RuntimeError, match="once"):
        first.wait()
    assert second.wait().tolist() == [2]


def test_busy_is_the_time_from_launch_to_end() -> None:
    runtime = LateRuntime()
    ring = OutputRing(runtime, depth=2, places=1)
    began = runtime.mark()
    pending = ring.send(int32(1), began)
    assert ring.busy == 0
    pending.wait()
    assert 0 < ring.busy <= runtime.mark().seconds_since(began)
