import asyncio

import pytest

from pagewire.services.detokenizer.frames import frame_sender
from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.state.stream import StreamState
from pagewire.shared.messages.client import ErrorFrame, Final
from tests.services.detokenizer.frames.senders import ACCEPTED, SlowBus, batch_of, end, grow, stream_of, subscribe
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_frames_wait_in_order_while_the_connection_lags() -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(2)
    subscribe(stream, "a")
    bus.waiting = frame_sender.HIGH_WATER
    sender.enqueue(stream)
    sender.drain()
    grow(stream, 300)
    end(stream)
    sender.enqueue(stream)
    sender.drain()
    assert bus.sent == []
    bus.waiting = 0
    await until(lambda: not stream.subscribers)
    frames = bus.frames("a")
    assert frames[0] == ACCEPTED
    assert bus.starts("a") == list(range(302))
    assert isinstance(frames[-2], Final)
    assert frames[-1] is None
    assert sender.frames == 304


async def test_a_broken_connection_loses_no_position() -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(3)
    subscribe(stream, "a")
    sender.enqueue(stream)
    sender.drain()
    bus.broken = True
    grow(stream, 3)
    sender.enqueue(stream)
    sender.drain()
    sender.keep_alive(stream)
    bus.broken = False
    await until(lambda: len(bus.starts("a")) == 6)
    assert bus.starts("a") == list(range(6))


def test_a_reader_far_behind_does_not_hold_up_the_others() -> None:
    bus = SlowBus()
    sender, long, short = FrameSender(bus), stream_of(frame_sender.QUOTA * 3), stream_of(1)
    subscribe(long, "far-behind")
    subscribe(short, "near")
    sender.enqueue(long)
    sender.enqueue(short)
    sender.drain()
    readers = [subject for subject, _ in bus.sent]
    assert readers.index("near") < 2 * frame_sender.QUOTA
    assert bus.starts("far-behind") == list(range(frame_sender.QUOTA * 3))


def test_the_last_frame_comes_only_when_the_stream_may_tell() -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(2, choices=2)
    subscribe(stream, "a")
    subscribe(stream, "whole", streaming=False)
    stream.state = StreamState.FINALIZING
    sender.enqueue(stream)
    sender.drain()
    assert bus.frames("whole") == []
    assert len(bus.frames("a")) == 5
    assert not stream.delivered.is_set()
    end(stream)
    sender.enqueue(stream)
    sender.drain()
    assert len(bus.frames("whole")) == 1
    assert bus.frames("a")[-1] is None
    assert stream.delivered.is_set()


@pytest.mark.parametrize(("start", "starts"), [(0, [0, 1, 2, 3]), (3, [3]), (9, [])])
def test_a_reader_may_begin_anywhere(start: int, starts: list[int]) -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(4)
    subscribe(stream, "a", start=start)
    sender.enqueue(stream)
    sender.drain()
    assert bus.starts("a") == starts


@pytest.mark.parametrize("batch_inbox", ["", "together"])
def test_a_frame_that_is_too_large_ends_its_reader_alone(batch_inbox: str) -> None:
    bus = SlowBus()
    bus.limit = 1 << 16
    sender, large, small = FrameSender(bus), stream_of(2), stream_of(2)
    aborted = []
    sender.abort = lambda stream, error: aborted.append((stream, error.code))
    large.completions[0].texts[1] = "\x01" * (bus.limit // 2)
    subscribe(large, "early", batch_inbox=batch_inbox)
    subscribe(large, "late", start=2, batch_inbox=batch_inbox)
    subscribe(small, "b", batch_inbox=batch_inbox)
    for stream in (large, small):
        sender.enqueue(stream)
    sender.drain()
    accepted, *_, error, end_of_stream = bus.frames("early")
    assert accepted == ACCEPTED
    assert isinstance(error, ErrorFrame)
    assert (error.code, error.tokens_emitted, end_of_stream) == (413, 2, None)
    assert [subscriber.reply for subscriber in large.subscribers] == ["late"]
    assert not aborted, "somebody reads on"
    assert sender.waiting == 0
    subscribe(large, "again", start=1)
    large.unsubscribe(large.subscribers[0])
    sender.enqueue(large)
    sender.drain()
    assert aborted == [(large, 413)]
    grow(small, 1)
    sender.enqueue(small)
    sender.drain()
    starts = bus.starts("b")
    starts += [
        start for subject, data in bus.sent if subject == "together" for name, start in batch_of(data) if name == "b"
    ]
    assert sorted(starts) == [0, 1, 2]


def test_rewinding_skips_nothing_that_was_not_sent() -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(4)
    reader = subscribe(stream, "a")
    reader.rewind(3)
    sender.enqueue(stream)
    sender.drain()
    reader.rewind(2)
    sender.enqueue(stream)
    sender.drain()
    assert bus.starts("a") == [0, 1, 2, 3, 2, 3]


async def test_a_closed_sender_sends_nothing_more() -> None:
    bus = SlowBus()
    sender, stream = FrameSender(bus), stream_of(2)
    subscribe(stream, "a")
    bus.waiting = frame_sender.HIGH_WATER
    sender.enqueue(stream)
    sender.drain()
    sender.close()
    bus.waiting = 0
    await asyncio.sleep(3 * frame_sender.RETRY_INTERVAL)
    assert bus.sent == []
