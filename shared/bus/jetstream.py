"""JetStream's API: its errors, and the search for a stream's leader in a cluster."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import msgspec

from pagewire.shared.bus.protocol import Bus
from pagewire.shared.errors import (
    BusError,
    BusUnavailable,
    ConfigurationError,
    ConnectionLost,
    NoResponders,
    RequestTimeout,
    StorageRefused,
)

API = "$JS.API"
LEADER_TIMEOUT = 0.5
"""Seconds within which a leader must answer."""
ELECTION_INTERVAL = 0.2
"""Seconds between two searches for a new leader."""
NAME_IN_USE = 10058
"""Error code: there is a stream of that name with another configuration."""
NOT_FOUND = 10059
"""Error code: there is no stream of that name."""
NO_MESSAGE = 10037
"""Error code: the stream has no such message."""
CHANGED = {10071, 10164}
"""Error codes: another message has been stored under the subject than the last one that was expected."""
NO_ROOM = 10047
"""Error code: the storage that streams reserve exceeds that of the server."""
NO_PEERS = 10005
"""Error code: too few servers of the cluster can keep a copy of the stream."""
NO_CLUSTER = 10074
"""Error code: a server that is not part of a cluster cannot keep several copies."""
UNAVAILABLE = 503
"""Code of an error that may pass by itself."""
NO_JETSTREAM = "the NATS server has no JetStream: start it with --jetstream"
NO_LEADER = 10008
"""Error code: the cluster elects a leader."""
NOT_NOW = {NO_LEADER, 10009, 10158}
"""Error codes: the cluster elects a leader, or the same message is just being stored."""


class Error(msgspec.Struct):
    """Why JetStream refused a request."""

    description: str
    code: int = 0
    """As in HTTP: 503 says that JetStream is there, but not available now."""
    err_code: int = 0


class Group(msgspec.Struct):
    """The servers of a cluster that have a stream or a consumer."""

    leader: str = ""
    """Name of the server that leads; empty while there is none."""


class Reply(msgspec.Struct):
    """The fields that replies of JetStream's API have."""

    error: Error | None = None
    cluster: Group | None = None
    """The servers that have the stream or the consumer that the reply is about; None: there is no cluster."""

    @property
    def leaderless(self) -> bool:
        """Whether the stream or the consumer has no leader: then another server has answered, with what it knows or
        with an error."""
        if self.error is not None:
            return self.error.err_code in NOT_NOW
        return self.cluster is not None and not self.cluster.leader


class NotNow(BusUnavailable):
    """JetStream cannot answer at this moment, but will soon."""


_reply = msgspec.json.Decoder(Reply)


def reply_of(data: bytes) -> Reply:
    """Returns the fields that all replies have."""
    return _reply.decode(data)


def error_of(data: bytes) -> Error | None:
    """Returns the error in a reply, None if there is none."""
    return reply_of(data).error


def refusal(stream: str, error: Error) -> ConfigurationError | StorageRefused | BusUnavailable:
    """Returns the error to raise when JetStream refuses a stream: a `ConfigurationError` if that cannot change by
    itself."""
    if error.code == UNAVAILABLE:
        return StorageRefused(stream, error.description)
    reason = f"JetStream refuses the stream {stream}: {error.description}"
    if error.err_code == NO_CLUSTER:
        return ConfigurationError(f"{reason}: set --nats-replicas to 1, or give the URLs of a cluster")
    if error.err_code == NO_ROOM or (error.err_code == NO_PEERS and "storage" in error.description):
        return ConfigurationError(f"{reason}: lower --nats-max-store")
    if error.err_code == NO_PEERS:
        return BusUnavailable(f"{reason}: --nats-replicas needs as many servers")
    return BusUnavailable(reason) if error.err_code in NOT_NOW else ConfigurationError(reason)


class LeaderSearch:
    """Finds the leaders of streams after a loss."""

    def __init__(self, bus: Bus, streams: Iterable[str], create: Callable[[], Awaitable[None]]) -> None:
        """`create` creates the streams again; it is called when the cluster has none, because it lost its disks."""
        self._bus = bus
        self._create = create
        self._led_at = dict.fromkeys(streams, 0.0)
        """By stream: time of the event loop at which its leader was found last."""
        self._searching = {stream: asyncio.Lock() for stream in self._led_at}

    async def find(self, stream: str, since: float) -> None:
        """Waits until a stream has a leader, found after the time `since`. One task searches for all that wait."""
        async with self._searching[stream]:
            while self._led_at[stream] <= since:
                if await self._has_leader(stream):
                    self._led_at[stream] = asyncio.get_running_loop().time()
                else:
                    await asyncio.sleep(ELECTION_INTERVAL)

    async def _has_leader(self, stream: str) -> bool:
        try:
            info = await self._bus.request(f"{API}.STREAM.INFO.{stream}", b"", timeout=LEADER_TIMEOUT)
        except (NoResponders, RequestTimeout, ConnectionLost):
            return False
        reply = reply_of(info.data)
        if reply.error is not None and reply.error.err_code == NOT_FOUND:
            with suppress(BusError, ConfigurationError):
                await self._create()
        return reply.error is None and not reply.leaderless
