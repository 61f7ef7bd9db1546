import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from pagewire.services.tokenizer.replicas import Replicas
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode, pack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.peers import SILENCE
from pagewire.shared.prefix_hashes import SPAN, prefix_hashes

PROMPT = pack(range(3 * SPAN))


def work(name: str = "r", prompt: bytes = PROMPT, n: int = 1, salt: str = "") -> WorkItem:
    sampling = Sampling(16, seed=7)
    return WorkItem(name, "", (prompt,), n, sampling, 0, 1e12, cache_salt=salt)


class Scene:
    """Schedulers as the test plays them, and what a tokenizer makes of them."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.replicas = Replicas(self.bus, "m")

    async def beat(self, scheduler: str, running: int = 0, waiting: int = 0, *, ready: bool = True) -> None:
        load = {"running": float(running), "waiting": float(waiting)}
        beat = Heartbeat("scheduler", scheduler, ready, 1, 0, 0, load)
        self.bus.publish(f"{subjects.HEARTBEAT}.scheduler.{scheduler}", encode(beat))
        await self.bus.flush()

    async def tell(self, scheduler: str, hashes: list[int], slots: int = 64, model: str = "m") -> None:
        told = CachedPrefixes(scheduler, slots, pack(hashes))
        self.bus.publish(f"{subjects.PREFIXES}.{model}.{scheduler}", encode(told))
        await self.bus.flush()


def play(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.replicas.listen()
        for name in ("a", "b"):
            await scene.tell(name, [])
            await scene.beat(name)
        await test(scene)

    asyncio.run(main())


def test_nothing_known_goes_to_any() -> None:
    async def main() -> None:
        assert Replicas(MemoryBus(MemoryBroker()), "m").choose(work()) == subjects.ANY

    asyncio.run(main())


def test_the_one_that_has_the_prefix_gets_it() -> None:
    async def test(scene: Scene) -> None:
        await scene.tell("b", prefix_hashes(PROMPT)[:2])
        assert all(scene.replicas.choose(work(f"r{i}")) == "b" for i in range(5))

    play(test)


def test_a_prefix_of_another_salt_is_no_reason_to_go_there() -> None:
    async def test(scene: Scene) -> None:
        await scene.tell("a", prefix_hashes(PROMPT))
        await scene.tell("b", prefix_hashes(PROMPT, "ours"))
        assert all(scene.replicas.choose(work(f"r{i}", salt="ours")) == "b" for i in range(5))
        assert all(scene.replicas.choose(work(f"s{i}")) == "a" for i in range(5))

    play(test)


def test_what_was_sent_counts_until_the_next_heartbeat() -> None:
    async def test(scene: Scene) -> None:
        await scene.tell("b", prefix_hashes(PROMPT))
        targets = [scene.replicas.choose(work(f"r{i}", n=7)) for i in range(4)]
        assert set(targets) == {"a", "b"}, "three requests of seven sequences are more than the slack"
        await scene.beat("a", running=3)
        await scene.beat("b", running=3)
        assert scene.replicas.choose(work()) == "b"

    play(test)


def test_waiting_sequences_are_load() -> None:
    async def test(scene: Scene) -> None:
        await scene.tell("b", prefix_hashes(PROMPT))
        await scene.beat("b", running=3, waiting=20)
        assert scene.replicas.choose(work()) == "a"

    play(test)


def test_one_that_is_not_ready_or_of_another_model_is_no_target() -> None:
    async def test(scene: Scene) -> None:
        await scene.beat("c", ready=True)
        await scene.tell("c", prefix_hashes(PROMPT), model="other")
        await scene.tell("d", prefix_hashes(PROMPT))
        await scene.beat("d", ready=False)
        assert scene.replicas.choose(work()) in {"a", "b"}

    play(test)


def test_a_silent_one_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        now = time.monotonic() + SILENCE
        monkeypatch.setattr("pagewire.services.tokenizer.replicas.time.monotonic", lambda: now)
        assert scene.replicas.choose(work()) == subjects.ANY
        await scene.tell("a", [])
        await scene.beat("a")
        assert scene.replicas.choose(work()) == subjects.ANY, "one is no choice"

    play(test)


def test_a_peer_that_cannot_be_understood_is_not_there() -> None:
    async def test(scene: Scene) -> None:
        scene.bus.publish(f"{subjects.PREFIXES}.m.a", b"\x01nonsense")
        scene.bus.publish(f"{subjects.HEARTBEAT}.scheduler.a", b"\x63")
        await scene.bus.flush()
        assert scene.replicas.choose(work()) in {"a", "b"}

    play(test)
