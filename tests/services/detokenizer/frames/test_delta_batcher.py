import asyncio
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.detokenizer.frames.delta_batcher import BATCH_BYTES
from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.state.stream import Stream, Subscriber
from pagewire.services.detokenizer.text.vocabulary import Spelling
from pagewire.shared.bus import Message
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import pack
from pagewire.shared.messages.client import DeltaBatch, Final
from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.open import Encoding, OpenState
from pagewire.shared.messages.step import Finish
from tests.services.detokenizer.frames.senders import SlowBus, batch_of, end, grow, stream_of, subscribe
from tests.services.detokenizer.rig import ids, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TOGETHER = "together"


def streams(sender: FrameSender, count: int, batch_inbox: str = TOGETHER) -> list[tuple[Stream, Subscriber]]:
    """Streams without a token whose subscribers have got the accepted frame."""
    streams = []
    for number in range(count):
        stream = stream_of(0)
        streams.append((stream, subscribe(stream, f"r{number}", batch_inbox=batch_inbox)))
        sender.enqueue(stream)
    sender.drain()
    return streams


def generate(sender: FrameSender, *growing: Stream, tokens: int = 1) -> None:
    """Does to streams what a step does: they get a token, and their subscribers are served."""
    for stream in growing:
        grow(stream, tokens)
        sender.enqueue(stream)
    sender.drain()


def test_deltas_that_are_due_together_are_one_message() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), (b, _), (c, _) = streams(sender, 3)
    bus.sent.clear()
    generate(sender, a, b, c, tokens=2)
    ((subject, data),) = bus.sent
    assert subject == TOGETHER
    assert batch_of(data) == [(reader, start) for reader in ("r0", "r1", "r2") for start in (0, 1)]
    assert sender.frames == 9


def test_a_delta_without_company_goes_to_its_own_reader() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), _ = streams(sender, 2)
    bus.sent.clear()
    generate(sender, a)
    assert [subject for subject, _ in bus.sent] == ["r0"]
    assert bus.starts("r0") == [0]


def test_connections_and_encodings_are_kept_apart() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    growing = []
    for number in range(8):
        stream = stream_of(0)
        growing.append(stream)
        encoding = Encoding.MSGPACK if number % 4 > 1 else Encoding.JSON
        subscribe(stream, f"r{number}", batch_inbox=f"inbox{number % 2}", encoding=encoding)
        sender.enqueue(stream)
    sender.drain()
    bus.sent.clear()
    generate(sender, *growing)
    decode = [msgspec.json.Decoder(DeltaBatch).decode, msgspec.msgpack.Decoder(DeltaBatch).decode]
    sent = [(subject, decode[data[:1] != b"{"](data).replies) for subject, data in bus.sent]
    assert sorted(sent) == [
        ("inbox0", ["r0", "r4"]),
        ("inbox0", ["r2", "r6"]),
        ("inbox1", ["r1", "r5"]),
        ("inbox1", ["r3", "r7"]),
    ]


def test_readers_without_a_batch_inbox_get_a_frame_per_token() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), (b, _) = streams(sender, 2, batch_inbox="")
    generate(sender, a, b)
    assert bus.starts("r0") == bus.starts("r1") == [0]


def test_an_end_stands_behind_its_deltas() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), (b, _), (c, _) = streams(sender, 3)
    bus.sent.clear()
    grow(a, 1)
    grow(b, 1)
    end(b)
    sender.enqueue(a)
    sender.enqueue(b)
    generate(sender, c)
    assert [subject for subject, _ in bus.sent] == [TOGETHER, "r1", "r1", "r2"]
    assert batch_of(bus.sent[0][1]) == [("r0", 0), ("r1", 0)]
    assert isinstance(bus.frames("r1")[0], Final)


def test_a_probe_reaches_its_reader_behind_earlier_deltas() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), (b, probed), (c, _), (d, _) = streams(sender, 4)
    bus.sent.clear()
    probed.probe = "anybody"
    generate(sender, a, b, c, d, tokens=2)
    assert bus.probes == ["r1"]
    assert [subject for subject, _ in bus.sent] == [TOGETHER, "r1", TOGETHER]
    assert bus.starts("r1") == [0]
    assert batch_of(bus.sent[2][1])[0] == ("r1", 1)
    assert probed.probe == ""


@pytest.mark.parametrize("character", ["e", "é", "\x01", "😀"])
@pytest.mark.parametrize("length", [1, 40, BATCH_BYTES // 40, BATCH_BYTES])
def test_a_message_with_several_deltas_has_its_bound(character: str, length: int) -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    readers = [(stream_of(0), f"r{number}" + "x" * 200) for number in range(40)]
    for stream, reply in readers:
        subscribe(stream, reply, batch_inbox=TOGETHER)
        stream.completions[0].tokens.append(1)
        stream.completions[0].texts.append(character * length)
        sender.enqueue(stream)
    sender.drain()
    assert all(len(data) <= BATCH_BYTES for subject, data in bus.sent if subject == TOGETHER)
    together = [reader for subject, data in bus.sent if subject == TOGETHER for reader, _ in batch_of(data)]
    alone = [reply for _, reply in readers if bus.starts(reply)]
    assert sorted(together + alone) == sorted(reply for _, reply in readers)
    assert bool(together) == (length < BATCH_BYTES)


@pytest.mark.parametrize("reported", [1, 40, 2000])
def test_a_message_with_log_probabilities_of_prompts_has_its_bound(reported: int) -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    token = ReportedLogprobs(1, pack(range(20)), struct.pack("<20f", *(-9.123456789 * rank for rank in range(20))))
    for number in range(8):
        stream = stream_of(1)
        stream.prompts = (pack([7] * reported),)
        stream.restored_prompt_logprobs = ((None, *[token] * reported),)
        subscribe(stream, f"r{number}", batch_inbox=TOGETHER)
        sender.enqueue(stream)
    sender.drain()
    together = [data for subject, data in bus.sent if subject == TOGETHER]
    assert all(len(data) <= BATCH_BYTES for data in together)
    alone = [number for number in range(8) if bus.starts(f"r{number}")]
    assert sum(len(batch_of(data)) for data in together) + len(alone) == 8
    assert bool(together) == (reported == 1)


def test_a_message_with_log_probabilities_of_long_tokens_has_its_bound() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    sender.spell = lambda _: Spelling("\x01" * 1000, b"\xff" * 1000)
    for number in range(8):
        stream = stream_of(1)
        stream.completions[0].logprobs = [ReportedLogprobs(1, pack([1]), struct.pack("<f", -1.0))]
        subscribe(stream, f"r{number}", batch_inbox=TOGETHER)
        sender.enqueue(stream)
    sender.drain()
    together = [data for subject, data in bus.sent if subject == TOGETHER]
    assert together
    assert all(len(data) <= BATCH_BYTES for data in together)


async def test_deltas_that_a_broken_connection_did_not_take_are_sent_when_it_is_back() -> None:
    bus = SlowBus()
    sender = FrameSender(bus)
    (a, _), (b, _) = streams(sender, 2)
    bus.sent.clear()
    bus.broken = True
    generate(sender, a, b)
    generate(sender, a, b)
    assert bus.sent == []
    bus.broken = False
    await until(lambda: bus.sent)
    ((_, data),) = bus.sent
    assert batch_of(data) == [("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1)]


class Breaking(SlowBus):
    """Takes or refuses each message as it was told."""

    def __init__(self, refusals: list[bool]) -> None:
        super().__init__()
        self.refusals = iter(refusals)

    def publish(self, subject: str, data: bytes, **options: object) -> None:
        if next(self.refusals, False):
            raise BusUnavailable("cut")
        self.sent.append((subject, data))


@settings(deadline=None)
@given(
    refusals=st.lists(st.booleans(), max_size=60),
    steps=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=8),
    together=st.lists(st.booleans(), min_size=4, max_size=4),
    probed=st.sets(st.integers(0, 7)),
)
def test_every_reader_gets_every_token_once_and_in_order(
    refusals: list[bool], steps: list[list[int]], together: list[bool], probed: set[int]
) -> None:
    bus = Breaking(refusals)
    got: dict[str, list[int]] = {f"r{number}": [] for number in range(4)}

    async def main() -> None:
        sender = FrameSender(bus)
        readers = []
        for number, batched in enumerate(together):
            stream = stream_of(0)
            readers.append(subscribe(stream, f"r{number}", batch_inbox=TOGETHER if batched else ""))
        for number, step in enumerate(steps):
            for reader, tokens in zip(readers, step, strict=True):
                if number in probed:
                    reader.probe = "probe"
                grow(reader.stream, tokens)
                sender.enqueue(reader.stream)
            sender.drain()
        for reader in readers:
            end(reader.stream)
            sender.enqueue(reader.stream)
        while any(reader.stream.subscribers for reader in readers):
            sender.drain()
        sender.close()

    asyncio.run(main())
    ended = set()
    for subject, data in bus.sent:
        parts = batch_of(data) if subject == TOGETHER else []
        if subject != TOGETHER and data:
            frame = msgspec.json.decode(data)
            parts = [(subject, frame["start"])] if frame["type"] == "delta" else []
            if frame["type"] == "final":
                ended.add(subject)
        for reader, start in parts:
            assert reader not in ended
            got[reader].append(start)
    assert ended == set(got)
    totals = [sum(step[number] for step in steps) for number in range(4)]
    assert list(got.values()) == [list(range(total)) for total in totals]


async def test_clients_with_a_batch_inbox_get_a_steps_rows_as_one_message(folder: Path) -> None:
    async with rig(folder) as world:
        together: list[Message] = []
        inbox = world.client.new_inbox()
        await world.client.subscribe(inbox, together.append)
        readers = []
        for name, first in (("r1", 100), ("r2", 200)):
            reader = await world.reader(Encoding.MSGPACK)
            opened = await world.open_for(
                reader, request_id=name, encoding=Encoding.MSGPACK, batch_inbox=inbox, timeout_ms=5000
            )
            assert opened == OpenState.OPENED
            await world.attach(request_id=name, first_sequence=first)
            readers.append(reader)
        for position, token in enumerate(ids("Hello world!")):
            finish = Finish.LENGTH if position == 2 else Finish.NONE
            world.step((100, position, token, finish), (200, position, token, finish))
        for reader in readers:
            assert (await reader.end()).usage.completion_tokens == 3
            assert reader.deltas == []
        batched = [msgspec.msgpack.decode(message.data, type=DeltaBatch) for message in together]
        assert [sorted(batch.replies) for batch in batched] == [sorted(reader.inbox for reader in readers)] * 3
        texts = [[delta.text for delta in batch.deltas] for batch in batched]
        assert texts == [["Hello"] * 2, [" world"] * 2, ["!"] * 2]
