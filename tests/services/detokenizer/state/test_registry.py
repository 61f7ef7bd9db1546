import asyncio
import gc
from weakref import ref

import pytest

from pagewire.services.detokenizer.state import registry
from pagewire.services.detokenizer.state.completion import Completion
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.restore import restore
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.errors import DeadlineExceeded
from pagewire.shared.messages import encode
from pagewire.shared.messages.done import ReportedLogprobs
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def store() -> MemoryStore:
    return MemoryStore(max_payload=1 << 20, ack_wait=2, done_age=120)


def ended(name: str) -> Stream:
    completion = Completion([1, 2], ["a", "b"], "stop", "x")
    return Stream(name, b"digest", [completion], prompt_tokens=3, cached_tokens=2, state=StreamState.ENDED)


async def test_a_stream_is_found_while_it_runs_and_for_a_while_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KEEP_ENDED", 0.05)

    streams, stream = Registry(store()), ended("r1")
    streams.add(stream)
    assert (len(streams), list(streams.open), streams.find("r1")) == (1, [stream], stream)
    streams.move_to_ended(stream)
    assert (len(streams), streams.find("r1")) == (0, stream)
    await until(lambda: streams.find("r1") is None)
    assert await streams.recall("r1") is None


async def test_the_end_of_a_dropped_stream_leaves_the_one_that_was_opened_since() -> None:
    streams, dropped, opened = Registry(store()), ended("r1"), ended("r1")
    streams.add(dropped)
    streams.drop(dropped)
    streams.move_to_ended(dropped)
    assert list(streams.open) == []
    streams.add(opened)
    streams.move_to_ended(dropped)
    assert list(streams.open) == [opened]


async def test_ended_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED", 3)

    streams = Registry(store())
    for number in range(5):
        stream = ended(f"r{number}")
        streams.add(stream)
        streams.move_to_ended(stream)
    assert [number for number in range(5) if streams.find(f"r{number}")] == [2, 3, 4]


class Completions(list[Completion]):
    """A list that can have weak references."""


async def test_a_stream_beyond_the_bound_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED", 1)

    streams, kept = Registry(store()), []
    for number in range(3):
        stream = ended(f"r{number}")
        stream.completions = Completions(stream.completions)
        kept.append(ref(stream.completions))
        streams.add(stream)
        streams.move_to_ended(stream)
    del stream
    gc.collect()
    assert [reference() is not None for reference in kept] == [False, False, True]


async def test_each_stream_is_kept_for_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed[0])

    streams = Registry(store())
    for number in range(3):
        stream = ended(f"r{number}")
        streams.add(stream)
        streams.move_to_ended(stream)
        passed[0] += 0.4 * registry.KEEP_ENDED
    await until(lambda: not streams.find("r0"))
    assert streams.find("r1")
    again = streams.find("r2")
    assert again
    streams.add(again)
    passed[0] += 0.5 * registry.KEEP_ENDED
    streams.move_to_ended(again)
    await until(lambda: not streams.find("r1"))
    passed[0] += 0.9 * registry.KEEP_ENDED
    await asyncio.sleep(0)
    assert streams.find("r2"), "it has ended again since"
    passed[0] += 0.2 * registry.KEEP_ENDED
    await until(lambda: not streams.find("r2"))


async def test_the_size_of_ended_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED_BYTES", 2 * registry.STREAM_BYTES + 600 * registry.TOKEN_BYTES)

    streams = Registry(store())
    for number, tokens in enumerate([500, 100, 10_000, 100, 100]):
        stream = ended(f"r{number}")
        stream.completions = [Completion([1] * tokens, ["a"] * tokens, "stop")]
        streams.add(stream)
        streams.move_to_ended(stream)
        assert streams.find(f"r{number}"), "the newest is kept whatever its size"
    assert [number for number in range(5) if streams.find(f"r{number}")] == [3, 4]


@pytest.mark.parametrize("of_prompt", [True, False])
async def test_log_probabilities_count_as_memory(*, of_prompt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation asks for those of 2,000 tokens and generates one."""
    reports = [ReportedLogprobs(1, b"1234" * 20, b"1234" * 20)] * 1000
    monkeypatch.setattr(registry, "MAX_ENDED_BYTES", 500 * registry.REPORT_BYTES)
    streams = Registry(store())
    for number in range(2):
        stream = ended(f"r{number}")
        if of_prompt:
            stream.restored_prompt_logprobs = (tuple(reports),)
        else:
            stream.completions = [Completion([1], ["a"], "stop", None, reports)]
        streams.add(stream)
        streams.move_to_ended(stream)
    assert not streams.find("r0")
    assert streams.find("r1")


@pytest.mark.parametrize("error", [None, DeadlineExceeded("too late")])
async def test_a_record_restores_everything_that_a_client_may_ask_for(error: DeadlineExceeded | None) -> None:
    records = store()
    before = ended("r1")
    before.error = error
    await records.put_done("r1", encode(before.record()))
    after = await Registry(records).recall("r1")
    assert after is not None
    assert after.state is StreamState.ENDED
    assert (after.digest, after.prompt_tokens, after.cached_tokens) == (b"digest", 3, 2)
    if error is None:
        (copy,) = after.completions
        assert (copy.tokens, copy.texts, copy.finish, copy.stop_reason) == (
            [1, 2],
            ["a", "b"],
            "stop",
            "x",
        )
        assert after.record() == before.record() == restore(after.record()).record()
    else:
        assert isinstance(after.error, DeadlineExceeded)
        assert after.error.message == "too late"


async def test_a_record_of_another_release_does_not_count() -> None:
    records = store()
    await records.put_done("r1", b"\x63 something else")
    await records.put_done("r2", b"\x01 something else")
    streams = Registry(records)
    assert await streams.recall("r1") is None
    assert await streams.recall("r2") is None
