"""Stores the items of held requests again that have vanished from the store.

A request that a scheduler holds goes on without its item, and would be lost with the scheduler.
"""

import asyncio
from collections.abc import Mapping

import structlog

from pagewire.services.scheduler.request import Request
from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages import encode
from pagewire.shared.vanished_items import VanishedItems

CHECK_INTERVAL = 1.0
"""Seconds between two checks for items that have vanished; it takes two to notice one."""

_log = structlog.get_logger()


class ItemRestorer:
    """Keeps an item in the store for each request of this scheduler that has not ended.

    Attributes:
        checks: number of checks so far; what is lost before one begins is stored again when the next one has ended.
    """

    def __init__(self, bus: Bus, model: str, instance: str, requests: Mapping[str, Request]) -> None:
        """`model`: token of the model in subjects; `requests`: all that this scheduler `instance` holds, by id."""
        self._store = bus.store
        self._model = model
        self._instance = instance
        self._requests = requests
        self._vanished = VanishedItems(bus, subjects.all_work(model))
        self.checks = 0

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            numbers = {
                request_id: request.number for request_id, request in self._requests.items() if not request.ended_at
            }
            try:
                for request_id in await self._vanished.find(numbers):
                    if (request := self._requests.get(request_id)) is not None:
                        await self._store_again(request)
                self.checks += 1
            except BusError as error:
                _log.warning("items_not_checked", reason=str(error), retry_in=CHECK_INTERVAL)

    async def _store_again(self, request: Request) -> None:
        """Stores an item in this scheduler's own queue, which others read when this one is gone."""
        queue = subjects.work_queue(self._model, request.work.priority, self._instance)
        headers = {"traceparent": request.trace} if request.trace else {}
        request.number = await self._store.put_work(queue, encode(request.work), headers=headers)
        request.queue = queue
        _log.error("item_stored_again", request_id=request.work.request_id, number=request.number)
