"""One scheduler owns an executor at a time."""

import pytest

from pagewire.services.executor.ownership import Ownership
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim
from pagewire.shared.process.peers import SILENCE


def beat(instance: str, term: int) -> Heartbeat:
    return Heartbeat("scheduler", instance, ready=True, term=term, plan=0, step=0, load={})


class World:
    """Heartbeats and time, as the test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.beats: dict[str, Heartbeat] = {}
        monkeypatch.setattr("pagewire.services.executor.ownership.time.monotonic", lambda: self.now)
        self.hears = True
        """Whether heartbeats arrive here, so that silence means something."""
        self.owner = Ownership("tiny", self.beats.get, lambda instance: self.hears and instance not in self.beats)

    def claim(self, scheduler: str, term: int, model: str = "tiny") -> bool:
        return self.owner.decide(Claim(scheduler, term, model))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_free_executor_takes_any_claim(world: World) -> None:
    assert world.claim("a", 4)
    assert world.owner.term == 4


def test_a_claim_for_another_model_is_declined(world: World) -> None:
    assert not world.claim("a", 4, model="huge")
    assert world.owner.term == 0


def test_an_owned_executor_is_declined_while_the_owner_lives(world: World) -> None:
    assert world.claim("a", 4)
    world.beats["a"] = beat("a", 4)
    world.now += 10 * SILENCE
    assert not world.claim("b", 5)
    assert world.owner.term == 4


def test_claims_and_plans_show_that_the_owner_lives(world: World) -> None:
    assert world.claim("a", 4)
    world.now += 0.9 * SILENCE
    assert not world.claim("b", 5)
    world.owner.renew()
    world.now += 0.9 * SILENCE
    assert not world.claim("b", 6)


def test_a_pause_of_the_executor_costs_no_owner_its_executor(world: World) -> None:
    assert world.claim("a", 4)
    world.now += 5 * SILENCE
    world.hears = False
    assert not world.claim("b", 5)
    world.hears = True
    assert world.claim("b", 6)


def test_a_silent_owner_loses_its_executor(world: World) -> None:
    assert world.claim("a", 4)
    world.now += SILENCE
    assert world.claim("b", 5)
    assert not world.claim("a", 4)  # woken up again
    assert world.owner.term == 5


def test_an_owner_with_another_executor_loses_this_one(world: World) -> None:
    assert world.claim("a", 4)
    world.beats["a"] = beat("a", 6)
    assert world.claim("b", 7)


def test_the_owner_may_begin_a_higher_term(world: World) -> None:
    assert world.claim("a", 4)
    assert world.claim("a", 5)
    assert world.owner.term == 5


def test_the_owners_claim_is_accepted_again_when_its_answer_was_lost(world: World) -> None:
    assert world.claim("a", 4)
    assert world.claim("a", 4)


@pytest.mark.parametrize("term", [3, 4])
def test_an_old_term_never_comes_back(world: World, term: int) -> None:
    assert world.claim("a", 4)
    world.now += SILENCE
    assert not world.claim("b", term)


def test_a_released_executor_takes_only_a_higher_term(world: World) -> None:
    assert world.claim("a", 4)
    world.beats["a"] = beat("a", 4)
    world.owner.release()
    assert not world.claim("a", 4)
    assert world.claim("b", 5)


def test_an_owner_whose_process_has_ended_loses_its_executor_at_once(world: World) -> None:
    assert world.claim("a", 4)
    assert not world.owner.forget("b")
    assert not world.claim("c", 5)
    assert world.owner.forget("a")
    assert world.owner.free
    assert not world.claim("c", 3), "the term still fences"
    assert world.claim("c", 5)
