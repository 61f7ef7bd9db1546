"""When a model is unloaded, and when it is loaded again: decided from heartbeats."""

from typing import Any

import pytest

from pagewire.embedded.idle_models import State, Usage
from pagewire.shared.messages.heartbeat import Heartbeat

LIMIT = 600.0


def beats(*, steps: int = 0, requests: int = 0, queued: int = 0, ready: bool = True) -> list[Heartbeat]:
    loads = {"executor": {"steps": steps}, "scheduler": {"requests": requests}, "tokenizer": {"queued": queued}}
    return [
        Heartbeat(service, service, ready, 0, 0, 0, {name: float(value) for name, value in load.items()})
        for service, load in loads.items()
    ]


def unloaded() -> Usage:
    usage = Usage(LIMIT, now=0.0)
    usage.observe(beats(), 0.0)
    assert usage.observe(beats(), LIMIT + 1) is State.UNLOADED
    return usage


def test_a_model_is_unloaded_after_the_limit_without_a_request() -> None:
    usage = Usage(LIMIT, now=0.0)
    usage.observe(beats(), 0.0)
    assert usage.observe(beats(), LIMIT) is State.LOADED
    assert usage.observe(beats(), LIMIT + 1) is State.UNLOADED


@pytest.mark.parametrize("load", [{"steps": 5}, {"requests": 1}, {"queued": 1}])
def test_a_model_that_is_used_stays(load: dict[str, Any]) -> None:
    usage = Usage(LIMIT, now=0.0)
    usage.observe(beats(), 0.0)
    usage.observe(beats(**load), LIMIT)
    assert usage.observe(beats(steps=load.get("steps", 0)), LIMIT + 1) is State.LOADED


def test_the_time_in_which_a_model_loads_does_not_count() -> None:
    usage = Usage(LIMIT, now=0.0)
    assert usage.observe(beats(ready=False), LIMIT + 1) is State.LOADED
    assert usage.observe(beats(), LIMIT + 2) is State.LOADED


def test_a_request_that_waits_loads_the_model_again() -> None:
    usage = unloaded()
    assert usage.observe(beats()[1:], LIMIT + 2) is State.UNLOADED
    assert usage.observe(beats(queued=1)[1:], LIMIT + 3) is State.LOADING
    assert usage.observe(beats(ready=False), LIMIT + 4) is State.LOADING
    assert usage.observe(beats(), LIMIT + 5) is State.LOADED
    assert usage.observe(beats(), 2 * LIMIT + 5) is State.LOADED


def test_an_executor_that_ends_its_last_requests_counts_as_unloaded() -> None:
    usage = unloaded()
    assert usage.observe(beats(requests=1), LIMIT + 2) is State.UNLOADED
