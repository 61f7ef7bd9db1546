"""Creates the streams of the store, and restores those that somebody has deleted or changed."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from pagewire.shared.bus.jetstream import (
    API,
    NAME_IN_USE,
    NO_JETSTREAM,
    NO_ROOM,
    NOT_FOUND,
    refusal,
)
from pagewire.shared.bus.protocol import Bus
from pagewire.shared.bus.store_replies import StreamInfo, stream_info
from pagewire.shared.bus.streams import EPOCH, NUMBERS_PER_SECOND, SHARES, STREAMS
from pagewire.shared.errors import ConfigurationError, NoResponders, StorageRefused

TIMEOUT = 2.0
"""Seconds within which JetStream must answer a request."""
REMOVAL_TIME = 1.0
"""Seconds that a server has to remove the folder of a deleted stream. A stream of that name that is created while the
server still removes the old one loses its own folder, and stores nothing."""
OWN_SETTINGS = frozenset({"metadata", "first_seq"})
"""Settings of a stream that the server keeps, or that matter only when it is created."""

_log = structlog.get_logger()


class StreamKeeper:
    """Keeps the streams as `STREAMS` says."""

    def __init__(self, bus: Bus, max_store: int, replicas: int, now: Callable[[], float]) -> None:
        """`max_store` is the number of bytes of all streams together, `replicas` the number of copies of each, and
        `now` returns the broker's time."""
        self._bus = bus
        self._max_store = max_store
        self._replicas = replicas
        self._now = now
        self._settings: dict[str, dict[str, Any]] = {}
        """The settings of each stream as the server has accepted them, with its defaults."""
        self._restoring = asyncio.Lock()
        self._restored_at = 0.0

    def max_bytes(self, stream: str) -> int:
        """Returns the bytes that a stream may take."""
        return int(self._max_store * SHARES[stream])

    async def prepare(self) -> None:
        """Creates the streams, or updates those of another release; several services may do so at the same time.

        Raises:
            ConfigurationError: the server has no room for the streams, or is in no cluster although they need one, or
                it has a stream of that name that cannot be updated.
            StorageRefused: JetStream is missing or not available now.
            BusUnavailable: the cluster cannot keep the streams now.
            RequestTimeout, NotPermitted
        """
        for name in STREAMS:
            await self._prepare(name)

    async def restore(self) -> None:
        """Creates the streams that are missing, once the server has removed them; raises what `prepare` raises.

        It is called by everybody who misses them; one task restores for all.
        """
        loop = asyncio.get_running_loop()
        missed_at = loop.time()
        async with self._restoring:
            if self._restored_at >= missed_at:
                return
            if any([await self._is_missing(name) for name in STREAMS]):
                await asyncio.sleep(REMOVAL_TIME)
            await self.prepare()
            self._restored_at = loop.time()

    async def mend(self) -> list[str]:
        """Restores streams that are missing and settings that were changed; returns what was wrong.

        Raises:
            StorageRefused: a stream cannot be restored.
            BusError: the broker does not answer.
        """
        repairs: list[str] = []
        try:
            for name in STREAMS:
                info = await self._info(name)
                if info.error is not None and info.error.err_code == NOT_FOUND:
                    await self.restore()
                    repairs.append(f"the stream {name} was deleted")
                elif info.error is None and (changes := self._changes(name, info.config)):
                    await self._prepare(name)
                    repairs.append(f"of the stream {name} these settings were changed: {', '.join(changes)}")
        except ConfigurationError as error:
            raise StorageRefused("a stream", str(error)) from None
        return repairs

    def _changes(self, name: str, settings: dict[str, Any]) -> list[str]:
        """Returns the settings of a stream that are no longer as this process has set them."""
        ours = self._settings.get(name)
        if ours is None:
            return []
        names = (ours.keys() | settings.keys()) - OWN_SETTINGS
        return sorted(each for each in names if ours.get(each) != settings.get(each))

    async def _prepare(self, name: str) -> None:
        config = {
            "name": name,
            "storage": "file",
            "max_bytes": self.max_bytes(name),
            "num_replicas": self._replicas,
            **STREAMS[name],
        }
        first = max(1, int((self._now() - EPOCH) * NUMBERS_PER_SECOND.get(name, 0)))
        reply = await self._call(f"STREAM.CREATE.{name}", config | {"first_seq": first})
        error = reply.error
        # The server looks for room before it looks whether the stream is there.
        if error is not None and error.err_code in {NAME_IN_USE, NO_ROOM}:
            reply = await self._call(f"STREAM.UPDATE.{name}", config)
            error = error if reply.error is not None and reply.error.err_code == NOT_FOUND else reply.error
        if error is not None:
            raise refusal(name, error)
        self._settings[name] = reply.config

    async def _is_missing(self, name: str) -> bool:
        error = (await self._info(name)).error
        return error is not None and error.err_code == NOT_FOUND

    async def _info(self, name: str) -> StreamInfo:
        return await self._call(f"STREAM.INFO.{name}", {})

    async def _call(self, call: str, body: Mapping[str, Any]) -> StreamInfo:
        return stream_info.decode(await call_api(self._bus, call, body))


async def call_api(bus: Bus, call: str, body: Mapping[str, Any]) -> bytes:
    """Returns the reply to a call of JetStream's API, which may be an error."""
    try:
        message = await bus.request(f"{API}.{call}", msgspec.json.encode(body), timeout=TIMEOUT)
    except NoResponders:
        raise StorageRefused(call, NO_JETSTREAM) from None
    return message.data
