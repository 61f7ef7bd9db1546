import asyncio

import pytest

from pagewire.services.detokenizer import finisher
from pagewire.services.detokenizer.finisher import Finisher
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.finish import FinishedSequences, FinishReason, FinishSequences

ATTACH = Attach("r1", 3, 1, "s1", "e1", "ack", 7, (b"",))


def ask(answers: list[bool]) -> list[FinishSequences]:
    """What a scheduler hears that answers as told, once per request."""
    heard: list[FinishSequences] = []

    async def main() -> None:
        bus = MemoryBus(MemoryBroker())

        def on_finish(message: Message) -> None:
            heard.append(Decoder(FinishSequences).decode(message.data))
            if answers[len(heard) - 1]:
                bus.publish(message.reply, encode(FinishedSequences(1)))

        if answers:
            await bus.subscribe(f"{subjects.FINISH}.s1.finish", on_finish)
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            Finisher(bus, tasks).finish(ATTACH, [7, 9], FinishReason.STOP_STRING)
        await bus.close()

    asyncio.run(main())
    return heard


def test_the_scheduler_is_asked_once_if_it_answers() -> None:
    (heard,) = ask([True])
    assert (heard.term, unpack(heard.sequences), heard.reason) == (3, [7, 9], FinishReason.STOP_STRING)


def test_it_is_asked_again_if_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finisher, "TIMEOUT", 0.02)
    assert len(ask([False, False, True])) == 3
    assert len(ask([False] * finisher.ATTEMPTS)) == finisher.ATTEMPTS


def test_a_scheduler_that_is_gone_is_left_alone() -> None:
    assert ask([]) == []
