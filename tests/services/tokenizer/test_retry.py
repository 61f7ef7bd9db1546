import pytest

from pagewire.services.tokenizer.retry import LONGEST_MS, SHORTEST_MS, WELCOME, retry_after_ms
from pagewire.shared.messages.heartbeat import Heartbeat


def scheduler(queued: float, drain_rate: float) -> Heartbeat:
    return Heartbeat("scheduler", "s", True, 1, 1, 1, {"queued": queued, "drain_rate": drain_rate})


def test_the_wait_is_what_the_queue_beyond_the_bound_takes_to_drain() -> None:
    assert retry_after_ms([scheduler(WELCOME + 100, 20.0)]) == 5000


def test_replicas_drain_one_queue() -> None:
    assert retry_after_ms([scheduler(WELCOME, 15.0), scheduler(100, 5.0)]) == 5000


@pytest.mark.parametrize("beats", [[], [scheduler(500, 0.0)], [scheduler(10_000, 1.0)]])
def test_nobody_is_sent_away_for_longer_than_the_longest(beats: list[Heartbeat]) -> None:
    assert retry_after_ms(beats) == LONGEST_MS


@pytest.mark.parametrize("queued", [0, WELCOME, WELCOME + 2])
def test_nobody_is_called_back_at_once(queued: int) -> None:
    assert retry_after_ms([scheduler(queued, 1000.0)]) == SHORTEST_MS


def test_a_scheduler_that_says_nothing_counts_nothing() -> None:
    silent = Heartbeat("scheduler", "s", True, 1, 1, 1, {})
    assert retry_after_ms([silent, scheduler(WELCOME + 100, 20.0)]) == 5000
