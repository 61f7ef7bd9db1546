import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.dispatch.replica_router import SLACK, Replica, ReplicaRouter, matched, route
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode, pack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.prefix_hashes import SPAN, prefix_hashes
from pagewire.shared.process.peers import SILENCE, Peers
from pagewire.shared.subjects import ANY

pytestmark = pytest.mark.anyio

HASHES = list(range(8))
"""Hashes of a prompt's prefixes."""


@st.composite
def replicas(draw: st.DrawFn, least: int = 2) -> list[Replica]:
    count = draw(st.integers(least, 6))
    return [
        Replica(
            instance=f"r{i}",
            slots=draw(st.integers(1, 64)),
            load=draw(st.integers(0, 100)),
            cached=draw(st.sets(st.integers(0, 12), max_size=6)),
        )
        for i in range(count)
    ]


def busy(replica: Replica) -> float:
    return replica.load / replica.slots


@given(st.text(max_size=8), replicas())
def test_a_replica_that_is_too_busy_is_not_chosen(name: str, fleet: list[Replica]) -> None:
    target = route(name, HASHES, fleet)
    chosen = {replica.instance: replica for replica in fleet}.get(target)
    assert chosen is not None or target == ANY
    if chosen is not None:
        assert busy(chosen) <= min(map(busy, fleet)) + SLACK


@given(st.text(max_size=8), replicas())
def test_the_chosen_replica_has_most_of_the_prefix(name: str, fleet: list[Replica]) -> None:
    target = route(name, HASHES, fleet)
    near = [replica for replica in fleet if busy(replica) <= min(map(busy, fleet)) + SLACK]
    longest = max(matched(HASHES, replica.cached) for replica in near)
    had = [matched(HASHES, replica.cached) for replica in near if replica.instance == target]
    assert had == [longest] or (target == ANY and longest == 0)


@given(st.text(max_size=8), replicas(), st.randoms())
def test_tokenizers_with_equal_knowledge_choose_one_replica(name: str, fleet: list[Replica], draw: object) -> None:
    shuffled = list(fleet)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    assert route(name, HASHES, fleet) == route(name, HASHES, shuffled)


@given(replicas(least=0).map(lambda fleet: fleet[:1]))
def test_fewer_than_two_replicas_leave_no_choice(fleet: list[Replica]) -> None:
    assert route("r", HASHES, fleet) == ANY


def test_the_least_busy_replica_takes_an_uncached_prompt() -> None:
    idle, working = Replica("idle", 64, 1, set()), Replica("working", 64, 5, set())
    assert route("r", HASHES, [working, idle]) == "idle"


def test_where_all_are_full_the_first_with_room_takes_an_uncached_prompt() -> None:
    full = [Replica(name, 4, 4, set()) for name in "ab"]
    assert route("r", HASHES, full) == ANY
    assert route("r", HASHES, [full[0], Replica("c", 4, 4, {HASHES[0]})]) == "c"


def test_equal_replicas_are_chosen_about_as_often() -> None:
    same = [Replica(name, 64, 3, set()) for name in "abcd"]
    targets = [route(f"r{i}", HASHES, same) for i in range(400)]
    assert min(targets.count(name) for name in "abcd") > 50


@given(st.sets(st.integers(0, 20)))
def test_the_longest_cached_prefix_matches(cached: set[int]) -> None:
    length = matched(HASHES, cached)
    assert length == 0 or HASHES[length - 1] in cached
    assert not cached & set(HASHES[length:])


PROMPT = pack(range(3 * SPAN))


def work(name: str = "r", prompt: bytes = PROMPT, n: int = 1, salt: str = "") -> WorkItem:
    sampling = Sampling(16, seed=7)
    return WorkItem(name, "", (prompt,), n, sampling, 0, 1e12, cache_salt=salt)


class Scene:
    """Schedulers that the test plays, and the router that listens to them."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.router = ReplicaRouter(self.bus, Peers(self.bus), "m")

    async def beat(self, scheduler: str, running: int = 0, waiting: int = 0, *, ready: bool = True) -> None:
        load = {"running": float(running), "waiting": float(waiting)}
        beat = Heartbeat("scheduler", scheduler, ready, 1, 0, 0, load)
        self.bus.publish(f"{subjects.HEARTBEAT}.scheduler.{scheduler}", encode(beat))
        await self.bus.flush()

    async def tell(self, scheduler: str, hashes: list[int], slots: int = 64, model: str = "m") -> None:
        cached = CachedPrefixes(scheduler, slots, pack(hashes))
        self.bus.publish(f"{subjects.PREFIXES}.{model}.{scheduler}", encode(cached))
        await self.bus.flush()


@pytest.fixture
async def scene() -> Scene:
    scene = Scene()
    await scene.router.listen()
    for name in ("a", "b"):
        await scene.tell(name, [])
        await scene.beat(name)
    return scene


async def test_without_a_known_replica_work_goes_to_any() -> None:
    bus = MemoryBus(MemoryBroker())
    assert ReplicaRouter(bus, Peers(bus), "m").choose(work()) == subjects.ANY


async def test_the_replica_that_has_the_prefix_gets_the_work(scene: Scene) -> None:
    await scene.tell("b", prefix_hashes(PROMPT)[:2])
    assert all(scene.router.choose(work(f"r{i}")) == "b" for i in range(5))


async def test_a_prefix_of_another_salt_attracts_no_work(scene: Scene) -> None:
    await scene.tell("a", prefix_hashes(PROMPT))
    await scene.tell("b", prefix_hashes(PROMPT, "ours"))
    assert all(scene.router.choose(work(f"r{i}", salt="ours")) == "b" for i in range(5))
    assert all(scene.router.choose(work(f"s{i}")) == "a" for i in range(5))


async def test_a_routed_request_counts_until_the_next_heartbeat(scene: Scene) -> None:
    await scene.tell("b", prefix_hashes(PROMPT))
    targets = [scene.router.choose(work(f"r{i}", n=7)) for i in range(4)]
    assert set(targets) == {"a", "b"}, "three requests of seven sequences are more than the slack"
    await scene.beat("a", running=3)
    await scene.beat("b", running=3)
    assert scene.router.choose(work()) == "b"


async def test_waiting_sequences_count_as_load(scene: Scene) -> None:
    await scene.tell("b", prefix_hashes(PROMPT))
    await scene.beat("b", running=3, waiting=20)
    assert scene.router.choose(work()) == "a"


async def test_a_replica_that_is_not_ready_or_of_another_model_is_no_target(scene: Scene) -> None:
    await scene.beat("c", ready=True)
    await scene.tell("c", prefix_hashes(PROMPT), model="other")
    await scene.tell("d", prefix_hashes(PROMPT))
    await scene.beat("d", ready=False)
    assert scene.router.choose(work()) in {"a", "b"}


async def test_a_silent_replica_is_no_target(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic() + SILENCE
    monkeypatch.setattr("pagewire.shared.process.peers.time.monotonic", lambda: now)
    assert scene.router.choose(work()) == subjects.ANY
    await scene.tell("a", [])
    await scene.beat("a")
    assert scene.router.choose(work()) == subjects.ANY, "one is no choice"


async def test_a_replica_with_unreadable_messages_is_no_target(scene: Scene) -> None:
    scene.bus.publish(f"{subjects.PREFIXES}.m.a", b"\x01nonsense")
    scene.bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", b"\x63")
    await scene.bus.flush()
    assert scene.router.choose(work()) in {"a", "b"}


async def test_nothing_is_kept_of_replicas_that_have_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that was never a choice, and of one whose last message comes late."""
    scene.router.choose(work())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * SILENCE)
    await scene.beat("c")
    for name in ("b", "c"):
        await scene.tell(name, [])
    scene.router.choose(work())
    assert set(scene.router._cached) == {"c"}
    assert set(scene.router._sent) <= {"c"}
