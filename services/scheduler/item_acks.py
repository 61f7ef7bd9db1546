"""Renews, returns and ends work items. A failure is no error here: the queue delivers the item again."""

from collections.abc import Coroutine

import structlog

from pagewire.shared.bus import Store
from pagewire.shared.errors import BusError

_log = structlog.get_logger()


class ItemAcks:
    """Answers the queue about the items that it has delivered here."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def renew(self, ack: str, request_id: str) -> None:
        """Keeps an item from being delivered again for a while."""
        await _log_failure(self._store.renew_work(ack), "item_not_renewed", request_id=request_id)

    async def give_back(self, ack: str) -> None:
        """Has the queue deliver an item again at once."""
        await _log_failure(self._store.return_work(ack), "item_not_returned")

    async def end(self, ack: str) -> None:
        """Removes an item from its queue."""
        await _log_failure(self._store.end_work(ack), "item_not_ended")

    async def is_done(self, request_id: str) -> bool:
        """Returns whether it is recorded that a request has ended. If the store does not answer, its detokenizer tells
        when it is attached."""
        try:
            return await self._store.get_done(request_id) is not None
        except BusError:
            return False


async def _log_failure(call: Coroutine[None, None, None], event: str, **context: str) -> None:
    try:
        await call
    except BusError as error:
        _log.warning(event, reason=str(error), **context)
