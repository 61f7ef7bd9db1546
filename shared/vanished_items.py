"""Finds the work items that are in no queue any more: an administrator has removed them, or a disk has lost them."""

from collections.abc import Iterable, Mapping

from pagewire.shared.bus import Bus
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.work import WorkItem

CHECKS_BY_NAME = 3
"""Checks after a reconnection that look for requests by name."""

_work = Decoder(WorkItem)


class VanishedItems:
    """Compares the requests of a service with the items that are stored.

    Numbers are compared, and for some time after a reconnection the requests' ids: a broker whose disk has lost the
    last items gives their numbers away again.
    """

    def __init__(self, bus: Bus, queues: str) -> None:
        """`queues`: first tokens of all queues in which the items can be."""
        self._store = bus.store
        self._queues = queues
        self._missing: set[str] = set()
        """Requests whose items the last check has missed."""
        self._checks_by_name = 0
        """Number of further checks that look for requests by name."""
        bus.on_reconnect(self._on_reconnect)

    async def find(self, numbers: Mapping[str, int]) -> set[str]:
        """Returns the requests whose items this check and the one before have missed; `numbers` has all by request id.

        One check is not enough: a new leader of the store may lag behind.

        Raises:
            BusError: the store does not answer.
        """
        before, self._missing = self._missing, set()
        if numbers:
            self._missing = await self._missing_of(numbers)
        return before & self._missing

    async def stored(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Returns the numbers of the items that are stored, by request id.

        Raises:
            BusError: the store does not answer.
        """
        ids, numbers, after = set(request_ids), dict[str, int](), 0
        while ids and (items := await self._store.list_work(self._queues, after)):
            after = items[-1].sequence
            for item in items:
                work = _work.try_decode(item.data)
                if work is not None and work.request_id in ids:
                    numbers[work.request_id] = item.sequence
        return numbers

    async def _missing_of(self, numbers: Mapping[str, int]) -> set[str]:
        if not self._checks_by_name:
            missing = await self._store.missing_work(set(numbers.values()))
            return {request_id for request_id, number in numbers.items() if number in missing}
        names = numbers.keys() - await self.stored(numbers)
        self._checks_by_name -= 1
        return names

    def _on_reconnect(self) -> None:
        self._checks_by_name = CHECKS_BY_NAME
