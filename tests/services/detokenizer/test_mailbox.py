import asyncio

import pytest

from pagewire.services.detokenizer import mailbox
from pagewire.services.detokenizer.mailbox import Outbox
from pagewire.services.detokenizer.stream import StreamState
from pagewire.shared.messages.client import Final
from tests.services.detokenizer.outboxes import HELLO, SlowBus, end, grow, read, stream_of
from tests.support.waiting import until


def test_frames_wait_in_order_while_the_connection_lags() -> None:
    async def main() -> None:
        bus = SlowBus()
        outbox, stream = Outbox(bus), stream_of(2)
        read(stream, "a")
        bus.waiting = mailbox.HIGH_WATER
        outbox.post(stream)
        outbox.drain()
        grow(stream, 300)
        end(stream)
        outbox.post(stream)
        outbox.drain()
        assert bus.sent == []
        bus.waiting = 0
        await until(lambda: not stream.mailboxes)
        frames = bus.frames("a")
        assert frames[0] == HELLO
        assert bus.starts("a") == list(range(302))
        assert isinstance(frames[-2], Final)
        assert frames[-1] is None
        assert outbox.frames == 304

    asyncio.run(main())


def test_a_broken_connection_loses_no_position() -> None:
    async def main() -> None:
        bus = SlowBus()
        outbox, stream = Outbox(bus), stream_of(3)
        read(stream, "a")
        outbox.post(stream)
        outbox.drain()
        bus.broken = True
        grow(stream, 3)
        outbox.post(stream)
        outbox.drain()
        outbox.keep_alive(stream)
        bus.broken = False
        await until(lambda: len(bus.starts("a")) == 6)
        assert bus.starts("a") == list(range(6))

    asyncio.run(main())


def test_a_reader_far_behind_does_not_hold_up_the_others() -> None:
    bus = SlowBus()
    outbox, long, short = Outbox(bus), stream_of(mailbox.QUOTA * 3), stream_of(1)
    read(long, "far-behind")
    read(short, "near")
    outbox.post(long)
    outbox.post(short)
    outbox.drain()
    readers = [subject for subject, _ in bus.sent]
    assert readers.index("near") < 2 * mailbox.QUOTA
    assert bus.starts("far-behind") == list(range(mailbox.QUOTA * 3))


def test_the_last_frame_comes_only_when_the_stream_may_tell() -> None:
    bus = SlowBus()
    outbox, stream = Outbox(bus), stream_of(2, choices=2)
    read(stream, "a")
    read(stream, "whole", streaming=False)
    stream.state = StreamState.ENDING
    outbox.post(stream)
    outbox.drain()
    assert bus.frames("whole") == []
    assert len(bus.frames("a")) == 5
    assert not stream.delivered.is_set()
    end(stream)
    outbox.post(stream)
    outbox.drain()
    assert len(bus.frames("whole")) == 1
    assert bus.frames("a")[-1] is None
    assert stream.delivered.is_set()


@pytest.mark.parametrize(("start", "starts"), [(0, [0, 1, 2, 3]), (3, [3]), (9, [])])
def test_a_reader_may_begin_anywhere(start: int, starts: list[int]) -> None:
    bus = SlowBus()
    outbox, stream = Outbox(bus), stream_of(4)
    read(stream, "a", start=start)
    outbox.post(stream)
    outbox.drain()
    assert bus.starts("a") == starts


def test_rewinding_skips_nothing_that_was_not_sent() -> None:
    bus = SlowBus()
    outbox, stream = Outbox(bus), stream_of(4)
    reader = read(stream, "a")
    reader.rewind(3)
    outbox.post(stream)
    outbox.drain()
    reader.rewind(2)
    outbox.post(stream)
    outbox.drain()
    assert bus.starts("a") == [0, 1, 2, 3, 2, 3]


def test_a_closed_outbox_sends_nothing_more() -> None:
    async def main() -> None:
        bus = SlowBus()
        outbox, stream = Outbox(bus), stream_of(2)
        read(stream, "a")
        bus.waiting = mailbox.HIGH_WATER
        outbox.post(stream)
        outbox.drain()
        outbox.close()
        bus.waiting = 0
        await asyncio.sleep(3 * mailbox.RETRY)
        assert bus.sent == []

    asyncio.run(main())
