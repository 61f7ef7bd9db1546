"""The broker's store of adapters: their content by its hash, and the hash that each name has now.

It is a stream of JetStream. A record of a name is also an ordinary message, so that services that subscribe to its
subject learn of it at once.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from pagewire.shared import subjects
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.bus import Bus, Headers, Message
from pagewire.shared.bus.framing import STATUS
from pagewire.shared.bus.jetstream import (
    API,
    CHANGED,
    NAME_IN_USE,
    NO_MESSAGE,
    NO_ROOM,
    NOT_FOUND,
    Error,
    error_of,
    refusal,
)
from pagewire.shared.bus.store_replies import RecordMessage, get_reply, put_reply, stream_info
from pagewire.shared.bus.streams import ADAPTER_STREAM as STREAM
from pagewire.shared.errors import BusError, ConfigurationError, NoResponders, RequestTimeout, StorageRefused
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.adapters import AdapterRecord

PART_BYTES = 1 << 19
"""Bytes of a part of an adapter's content."""
TIMEOUT = 5.0
"""Seconds within which JetStream must answer a request."""
PART_TIMEOUT = 60.0
"""Seconds within which the broker must send a part of an adapter, however often it is asked."""
ATTEMPTS = 5
"""Requests until one that JetStream does not answer counts as failed: a stream may change its leader meanwhile."""
PAUSE = 1.0
"""Seconds between two attempts."""
KEPT_SECONDS = 3600.0
"""Seconds for which content without a name is kept: longer than requests run."""
SUBJECT = "Nats-Subject"
"""Header with the subject under which a message was stored."""
SEQUENCE = "Nats-Sequence"
"""Header with a message's number in the stream: the revision of a name."""
EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
"""Header with the number that the last message of the subject must have; 0: there must be none."""
LIST_BATCH = 256
"""Maximum number of records in an answer."""

_records = Decoder(AdapterRecord)


class AdapterStore:
    """The adapters of all models on a broker."""

    def __init__(self, bus: Bus, model: str) -> None:
        """`model` is the token of the model whose names are read and set."""
        self._bus = bus
        self._names = f"{subjects.ADAPTER_NAME}.{model}"

    async def prepare(self, max_bytes: int, replicas: int) -> None:
        """Creates the stream. Several services may do so at the same time.

        Raises:
            ConfigurationError: the server has no room for it.
            BusError: JetStream does not answer now.
        """
        config = {
            "name": STREAM,
            "subjects": [f"{subjects.ADAPTER}.>"],
            "storage": "file",
            "max_bytes": max_bytes,
            "num_replicas": replicas,
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_direct": True,
        }
        error = await self._call("CREATE", config)
        # The server looks for room before it looks whether the stream is there.
        if error is not None and error.err_code in {NAME_IN_USE, NO_ROOM}:
            other = await self._call("UPDATE", config)
            error = error if other is not None and other.err_code == NOT_FOUND else other
        if error is not None and error.err_code == NO_ROOM:
            raise ConfigurationError(f"the broker has no room for adapters ({error.description}): lower adapter-store")
        if error is not None:
            raise refusal(STREAM, error)

    async def put(self, files: AdapterFiles) -> None:
        """Stores what is missing or damaged of an adapter's content. Another thread should have computed its digest.

        Raises:
            BusError: JetStream has no room, or does not answer.
        """
        await self.retire(files.digest)  # so that no executor deletes it before it has a name
        subject = f"{subjects.ADAPTER_CONTENT}.{files.digest}"
        data = await asyncio.to_thread(msgspec.msgpack.encode, files)
        size = min(PART_BYTES, self._bus.max_payload // 2)
        parts = range(0, len(data), size)
        try:
            for number, begin in enumerate(parts):
                await self._replace(f"{subject}.{number}", data[begin : begin + size])
        except StorageRefused:
            if not await self.has(files.digest):  # the parts that are there take the room of other adapters
                await self._purge(f"{subject}.*")
            raise
        await self._replace(f"{subject}.parts", str(len(parts)).encode())  # last, as it says that all parts are there

    async def has(self, digest: str) -> bool:
        """Returns whether there is content with this hash. It may be damaged.

        Raises:
            BusError: JetStream does not answer.
        """
        return await self._newest(f"{subjects.ADAPTER_CONTENT}.{digest}.parts") is not None

    async def get(self, digest: str) -> AdapterFiles:
        """Returns the content with this hash.

        Raises:
            ConfigurationError: it is not there, or it is damaged.
            BusError: JetStream does not answer.
        """
        subject = f"{subjects.ADAPTER_CONTENT}.{digest}"
        count = await self._fetch(f"{subject}.parts")
        parts = [await self._fetch(f"{subject}.{number}") for number in range(int(count or b"0"))]
        if not parts or None in parts:
            raise ConfigurationError("the broker does not have the adapter: load it again")
        return await asyncio.to_thread(_decode, digest, [part for part in parts if part is not None])

    async def set_name(self, record: AdapterRecord, revision: int) -> bool:
        """Gives a name another adapter, or none; returns whether it has it: not if it has changed since `revision`.

        Raises:
            BusError: JetStream has no room, or does not answer.
        """
        subject, expected = self._subject(record.name), {EXPECTED_SEQUENCE: str(revision)}
        stored = put_reply.decode((await self._request(subject, encode(record), expected)).data)
        if stored.error is not None and stored.error.err_code in CHANGED:
            current, revision = await self.record(record.name)
            if current is not None and current != record:  # those who follow the name have seen the refused record
                await self._request(subject, encode(current), {EXPECTED_SEQUENCE: str(revision)})
            return current == record  # an earlier attempt has set it, whose answer was lost
        if stored.error is not None:
            raise StorageRefused(subject, stored.error.description)
        return True

    async def record(self, name: str) -> tuple[AdapterRecord | None, int]:
        """Returns the record of a name, and its revision; None and 0 if it never had one.

        Raises:
            BusError: JetStream does not answer.
        """
        message = await self._newest(self._subject(name))
        return (None, 0) if message is None else (_records.try_decode(message.data), message.seq)

    async def records(self) -> list[AdapterRecord]:
        """Returns the records of all names of the model, those without an adapter too. Newer ones may be missing.

        Raises:
            BusError: JetStream does not answer.
        """
        records = [_records.try_decode(message.data) async for message in self._messages(f"{self._names}.*")]
        return [record for record in records if record is not None]

    async def retire(self, digest: str) -> None:
        """Marks the content `digest` as without a name from now on. If it still has one, the mark means nothing.

        For `KEPT_SECONDS`, requests that have begun with it can go on, also on an executor that starts again.

        Raises:
            BusError: JetStream has no room, or does not answer.
        """
        await self._put(f"{subjects.ADAPTER_RETIRED}.{digest}", b"-")

    async def sweep(self) -> None:
        """Deletes content that has had a mark for `KEPT_SECONDS` and no name, and marks all other without a name.

        Raises:
            BusError: JetStream does not answer, or refuses a change.
        """
        now, stored = await self._contents()
        marks = {_last_token(mark): mark async for mark in self._messages(f"{subjects.ADAPTER_RETIRED}.*")}
        records = [_records.try_decode(m.data) async for m in self._messages(f"{subjects.ADAPTER_NAME}.*.*")]
        named = {record.digest for record in records if record is not None}
        for digest, mark in marks.items():
            if digest not in named:
                if now - _stored_at(mark) < KEPT_SECONDS or await self._is_marked_again(mark):
                    continue
                await self._purge(f"{subjects.ADAPTER_CONTENT}.{digest}.*")
            await self._purge(mark.headers[SUBJECT], 1 + int(mark.headers[SEQUENCE]))
        for digest in stored - named - marks.keys():  # as when an executor ends while it stores the content
            await self.retire(digest)

    async def _contents(self) -> tuple[float, set[str]]:
        """Returns the broker's time, as Unix time in seconds, and the hashes of all content, complete or not."""
        digests: set[str] = set()
        now, offset, total = 0.0, 0, 1
        while offset < total:
            request = {"subjects_filter": f"{subjects.ADAPTER_CONTENT}.>", "offset": offset}
            reply = await self._request(f"{API}.STREAM.INFO.{STREAM}", msgspec.json.encode(request))
            info = stream_info.decode(reply.data)
            if info.error is not None or info.ts is None:
                raise StorageRefused(STREAM, "" if info.error is None else info.error.description)
            parts = info.state.subjects or {}
            digests.update(part.split(".")[-2] for part in parts)
            now, offset, total = info.ts.timestamp(), offset + max(1, len(parts)), info.total
        return now, digests

    async def _is_marked_again(self, mark: Message) -> bool:
        """Returns whether content has a newer mark than this one: an executor is about to give it a name."""
        last = await self._newest(mark.headers[SUBJECT])
        return last is not None and last.seq != int(mark.headers[SEQUENCE])

    async def _purge(self, pattern: str, before: int = 0) -> None:
        """Deletes the messages of subjects that match, those with lower numbers than `before`; 0: all."""
        error = await self._call("PURGE", {"filter": pattern, "seq": before})
        if error is not None:
            raise StorageRefused(pattern, error.description)

    async def _call(self, verb: str, config: Mapping[str, Any]) -> Error | None:
        """Returns why JetStream refuses a call of its API for the stream, None if it does not."""
        return error_of((await self._request(f"{API}.STREAM.{verb}.{STREAM}", msgspec.json.encode(config))).data)

    async def _messages(self, pattern: str) -> AsyncIterator[Message]:
        """Yields the last message of each subject that matches."""
        sequence, count = 0, LIST_BATCH
        while count == LIST_BATCH:
            count = 0
            request = {"seq": sequence + 1, "batch": LIST_BATCH, "next_by_subj": pattern}
            answers = self._bus.request_many(f"{API}.DIRECT.GET.{STREAM}", msgspec.json.encode(request), stall=TIMEOUT)
            async for message in answers:
                count, sequence = count + 1, int(message.headers[SEQUENCE])
                yield message

    async def _replace(self, subject: str, data: bytes) -> None:
        """Stores a message unless it is there."""
        if await self._get(subject) != data:
            await self._put(subject, data)

    async def _put(self, subject: str, data: bytes) -> None:
        stored = put_reply.decode((await self._request(subject, data)).data)
        if stored.error is not None:
            raise StorageRefused(subject, stored.error.description)

    async def _get(self, subject: str) -> bytes | None:
        """Returns the last message of a subject; None: the server that was asked has none, as it may be behind."""
        message = await self._request(f"{API}.DIRECT.GET.{STREAM}.{subject}", b"")
        return None if STATUS in message.headers else message.data

    async def _fetch(self, subject: str) -> bytes | None:
        """Returns a part of an adapter; None: there is none. Raises RequestTimeout if it does not come in time."""
        try:
            async with asyncio.timeout(PART_TIMEOUT):
                return await self._find(subject)
        except TimeoutError as error:
            raise RequestTimeout(subject) from error

    async def _find(self, subject: str) -> bytes | None:
        """Returns the last message of a subject; None: there is none."""
        if (data := await self._get(subject)) is not None:
            return data
        newest = await self._newest(subject)
        return None if newest is None else newest.data

    async def _newest(self, subject: str) -> RecordMessage | None:
        """Returns the last message of a subject, as the leader of a cluster has it; None: there is none."""
        request = msgspec.json.encode({"last_by_subj": subject})
        reply = get_reply.decode((await self._request(f"{API}.STREAM.MSG.GET.{STREAM}", request)).data)
        if reply.error is not None and reply.error.err_code != NO_MESSAGE:
            raise StorageRefused(subject, reply.error.description)
        return reply.message

    def _subject(self, name: str) -> str:
        return f"{self._names}.{subjects.model_token(name)}"

    async def _request(self, subject: str, data: bytes, headers: Headers | None = None) -> Message:
        """Sends a request, and sends it again if nobody answers: each of them has the same effect twice as once."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)
            except (NoResponders, RequestTimeout):
                await asyncio.sleep(PAUSE)
            except BusError:
                await self._bus.wait_connected()
        return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)


def _decode(digest: str, parts: Sequence[bytes]) -> AdapterFiles:
    """Returns the content of which these are all parts. Blocks for as long as hashing it takes.

    Raises:
        ConfigurationError: it is not the content with this hash.
    """
    try:
        files = msgspec.msgpack.decode(b"".join(parts), type=AdapterFiles)
    except msgspec.DecodeError as error:
        raise ConfigurationError("the broker has damaged the adapter: load it again") from error
    if files.digest != digest:
        raise ConfigurationError("the broker has damaged the adapter: load it again")
    return files


def _last_token(message: Message) -> str:
    """Returns the last token of the subject under which a message was stored."""
    return message.headers[SUBJECT].rpartition(".")[2]


def _stored_at(message: Message) -> float:
    """Returns the Unix time in seconds at which the broker stored a message, by its own clock."""
    return datetime.fromisoformat(message.headers["Nats-Time-Stamp"]).timestamp()


def pattern_of(model: str) -> str:
    """Returns the pattern of the subjects of a model's names. `model` is its token."""
    return f"{subjects.ADAPTER_NAME}.{model}.*"


def record_of(message: Message) -> AdapterRecord | None:
    """Returns the record in a message to a subject of `pattern_of`; None if it is unreadable."""
    return _records.read(message)
