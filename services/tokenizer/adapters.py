"""The adapters of the served model, by the names under which clients ask for them."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from pagewire.shared import subjects
from pagewire.shared.adapters.adapter_store import AdapterStore, pattern_of, record_of
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusError
from pagewire.shared.messages.adapters import AdapterRecord
from pagewire.shared.messages.client import ModelInfo

READ_EVERY = 10.0
"""Seconds between two readings of all records, should a message of one have been lost."""
RETRY_EVERY = 0.5
"""Seconds between two attempts to read them for the first time: the store is not there before an executor is."""

_log = structlog.get_logger()


class ServedAdapter(NamedTuple):
    """An adapter with its name in requests."""

    name: str
    digest: str
    """Hash of its content."""


class ServedAdapters:
    """The adapters that requests may name.

    Attributes:
        possible: whether there can be any.
        known: whether they have been read.
    """

    def __init__(self, *, possible: bool) -> None:
        self.possible = possible
        self.known = not possible
        self._by_token: dict[str, ServedAdapter] = {}

    def find(self, token: str) -> ServedAdapter | None:
        """Returns the adapter whose name is `token` as a token of subjects; None if there is none."""
        return self._by_token.get(token)

    def infos(self, parent: ModelInfo) -> list[ModelInfo]:
        """Returns descriptions for clients, from that of the model that they change."""
        return [
            ModelInfo(
                adapter.name,
                f"{subjects.GENERATE}.{token}",
                parent.max_model_len,
                parent.revision,
                root=adapter.digest,
                parent=parent.name,
            )
            for token, adapter in self._by_token.items()
        ]

    async def follow(self, bus: Bus, model: str, on_change: Callable[[], None]) -> None:
        """Follows the records of the model, whose token is `model`, until cancelled."""
        store = AdapterStore(bus, model)
        received: list[AdapterRecord] = []

        def receive(message: Message) -> None:
            if (record := record_of(message)) is not None:
                received.append(record)
                if self._set(record):
                    on_change()

        read_again = asyncio.Event()
        bus.on_reconnect(read_again.set)
        await bus.subscribe(pattern_of(model), receive)
        while True:
            read_again.clear()
            received.clear()
            try:
                records = [record for record in await store.records() if self._differs(record)]
                # The server that was asked may be behind others of a cluster, and may revert no name.
                confirmed = [(await store.record(record.name))[0] for record in records]
            except BusError as error:
                _log.debug("adapters_not_read", reason=str(error))
            else:
                # Those that came meanwhile may be newer.
                changes = [self._set(record) for record in (*confirmed, *received) if record is not None]
                if any(changes) or not self.known:
                    self.known = True
                    on_change()
            try:
                async with asyncio.timeout(READ_EVERY if self.known else RETRY_EVERY):
                    await read_again.wait()
            except TimeoutError:
                continue

    def _differs(self, record: AdapterRecord) -> bool:
        """Returns whether a record says something else of its name than what is known."""
        return self.find(subjects.model_token(record.name)) != _adapter_of(record)

    def _set(self, record: AdapterRecord) -> bool:
        """Applies a record; returns whether it changes anything."""
        token, adapter = subjects.model_token(record.name), _adapter_of(record)
        if not self._differs(record):
            return False
        if adapter is None:
            del self._by_token[token]
        else:
            self._by_token[token] = adapter
        return True


def _adapter_of(record: AdapterRecord) -> ServedAdapter | None:
    return ServedAdapter(record.name, record.digest) if record.digest else None
