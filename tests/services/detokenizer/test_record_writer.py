import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.services.detokenizer import record_writer
from pagewire.services.detokenizer.record_writer import RecordWriter
from pagewire.shared.errors import BusUnavailable, MessageTooLarge
from tests.support.switched_store import SwitchedStore, switched_bus
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

FULL = BusUnavailable("insufficient resources")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "WRITE_TIMEOUT", 0.05)
    monkeypatch.setattr(record_writer, "RETRY_INTERVAL", 0.01)


@asynccontextmanager
async def writing() -> AsyncIterator[tuple[RecordWriter, SwitchedStore]]:
    """A writer whose tasks end with the block, which lasts 5 s at most."""
    bus, store = switched_bus()
    group = asyncio.TaskGroup()
    async with asyncio.timeout(PATIENCE), group:
        yield RecordWriter(bus, group), store
    await bus.close()


def counts(writer: RecordWriter) -> tuple[int, int, int]:
    return writer.failed, writer.lost, writer.waiting


async def test_a_record_is_stored_at_once() -> None:
    async with writing() as (writer, store):
        await writer.write("r1", b"record")
        assert await store.get_done("r1") == b"record"
        assert counts(writer) == (0, 0, 0)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_record_that_the_store_refuses_is_stored_when_it_has_room_again(silent: bool) -> None:
    async with writing() as (writer, store):
        store.refusal, store.silent = (None, True) if silent else (FULL, False)
        await writer.write("r1", b"one")
        await writer.write("r2", b"two")
        assert counts(writer) == (2, 0, 2)
        store.refusal, store.silent = None, False
        await until(lambda: not writer.waiting)
        assert (await store.get_done("r1"), await store.get_done("r2")) == (b"one", b"two")
        assert counts(writer) == (2, 0, 0)


async def test_only_the_first_stream_waits_for_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "RETRY_INTERVAL", 0.2)
    async with writing() as (writer, store):
        store.silent = True
        await writer.write("r1", b"one")
        await writer.write("r2", b"two")
        assert (counts(writer), store.attempts) == ((2, 0, 2), 1)
        store.silent = False
        await until(lambda: not writer.waiting)
        assert (await store.get_done("r1"), await store.get_done("r2")) == (b"one", b"two")


async def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "MAX_BACKLOG", 3)
    monkeypatch.setattr(record_writer, "MAX_BACKLOG_BYTES", 25)
    async with writing() as (writer, store):
        store.refusal = FULL
        for number in range(4):
            await writer.write(f"r{number}", b"x")
        assert counts(writer) == (4, 1, 3)
        await writer.write("large", b"x" * 24)
        assert counts(writer) == (5, 3, 2)
        store.refusal = None
        await until(lambda: not writer.waiting)
        assert await store.get_done("large")
        assert await store.get_done("r2") is None


async def test_a_record_is_given_up_when_it_would_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "DONE_AGE", 0.05)
    async with writing() as (writer, store):
        store.refusal = FULL
        await writer.write("r1", b"one")
        await until(lambda: not writer.waiting)
        assert counts(writer) == (1, 1, 0)


async def test_a_record_that_is_too_large_does_not_hold_up_the_backlog() -> None:
    async with writing() as (writer, store):
        store.refusal = FULL
        await writer.write("r1", b"x" * (1 + (1 << 20)))
        await writer.write("r2", b"two")
        store.refusal = None
        await until(lambda: not writer.waiting)
        assert await store.get_done("r2") == b"two"
        assert counts(writer) == (2, 1, 0)


async def test_a_record_that_is_too_large_is_not_tried_again() -> None:
    async with writing() as (writer, store):
        store.refusal = MessageTooLarge(2, 1)
        await writer.write("r1", b"one")
        assert (counts(writer), store.attempts) == ((1, 1, 0), 1)
