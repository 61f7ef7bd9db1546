import asyncio

import pytest

from pagewire.services.detokenizer import abort_notifier
from pagewire.services.detokenizer.abort_notifier import AbortNotifier
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.attach import Attach
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio
ATTACH = Attach("r1", 3, 1, "s1", "e1", "ack", 7, (b"",))


async def abort(answers: list[bool]) -> list[AbortSequences]:
    """Aborts two sequences; returns what the scheduler gets. It answers each request, or not, as told."""
    bus = MemoryBus(MemoryBroker())
    heard: list[AbortSequences] = []

    def on_abort(message: Message) -> None:
        heard.append(Decoder(AbortSequences).decode(message.data))
        if answers[len(heard) - 1]:
            bus.publish(message.reply, encode(AbortedSequences(1)))

    if answers:
        await bus.subscribe(f"{subjects.ABORT}.s1.abort", on_abort)
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        AbortNotifier(bus, tasks).abort(ATTACH, [7, 9], AbortReason.STOP_STRING)
    await bus.close()
    return heard


async def test_the_scheduler_is_asked_once_if_it_answers() -> None:
    (heard,) = await abort([True])
    assert (heard.term, unpack(heard.sequences), heard.reason) == (3, [7, 9], AbortReason.STOP_STRING)


async def test_the_scheduler_is_asked_again_if_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_notifier, "ABORT_TIMEOUT", 0.02)
    assert len(await abort([False, False, True])) == 3
    assert len(await abort([False] * abort_notifier.ABORT_ATTEMPTS)) == abort_notifier.ABORT_ATTEMPTS


async def test_a_scheduler_that_is_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_notifier, "ABSENCE", 0.05)
    assert await abort([]) == []


async def test_a_scheduler_that_moves_to_another_server_is_asked_again() -> None:
    bus = MemoryBus(MemoryBroker())
    heard = asyncio.Event()

    def on_abort(message: Message) -> None:
        heard.set()
        bus.publish(message.reply, encode(AbortedSequences(1)))

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        AbortNotifier(bus, tasks).abort(ATTACH, [7, 9], AbortReason.CANCELLED)
        await asyncio.sleep(0.05)  # the notifier has found nobody
        await bus.subscribe(f"{subjects.ABORT}.s1.abort", on_abort)
        await heard.wait()
    await bus.close()
