"""Which queues this scheduler pulls from: its own, those of any replica, and those of replicas that have gone."""

import asyncio
from collections.abc import Callable

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Item, Store
from pagewire.shared.errors import BusError
from pagewire.shared.peers import SILENCE, Peers

PULL_EXPIRES = 2.0
"""Seconds that a pull waits at the queue. A frozen puller swallows new items for no longer."""
LOOK_EVERY = 1.0
"""Seconds between two looks for queues that nobody pulls."""
RETRY = 0.5
"""Seconds until a queue that could not be reached is pulled again."""

_log = structlog.get_logger()


class Pulls:
    """One pull per queue, each for as many items as there is room for: no queue hides behind the head of another.

    Args:
        model: token of the served model.
        room: how many items of a queue could be taken now.
        take: takes an item of a queue.
    """

    def __init__(
        self,
        store: Store,
        peers: Peers,
        model: str,
        instance: str,
        room: Callable[[str], int],
        take: Callable[[str, Item], None],
    ) -> None:
        self._store = store
        self._peers = peers
        self._model = model
        self._instance = instance
        self._room = room
        self._take = take
        self._more = asyncio.Event()
        self._own = {*subjects.work_queues(model, instance), *subjects.work_queues(model, subjects.ANY)}
        self._wanted = set(self._own)
        self._pulled: set[str] = set()

    def retry(self) -> None:
        """There may be room."""
        self._more.set()
        self._more.clear()

    async def run(self) -> None:
        """Pulls until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._start(tasks)
            await asyncio.sleep(SILENCE)  # whoever has not been heard by then is silent
            while True:
                self._wanted = self._own | await self._find_orphans()
                self._start(tasks)
                await asyncio.sleep(LOOK_EVERY)

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        for queue in self._wanted - self._pulled:
            self._pulled.add(queue)
            tasks.create_task(self._pull(queue))

    async def _pull(self, queue: str) -> None:
        try:
            while queue in self._wanted:
                if (room := self._room(queue)) <= 0:
                    await self._more.wait()
                    continue
                try:
                    items = await self._store.pull_work(queue, room, expires=PULL_EXPIRES)
                except BusError as error:
                    _log.warning("queue_unreachable", queue=queue, reason=str(error), retry_in=RETRY)
                    await asyncio.sleep(RETRY)
                    continue
                for item in items:
                    self._take(queue, item)
        finally:
            self._pulled.discard(queue)

    async def _find_orphans(self) -> set[str]:
        """Queues that hold work for replicas which are silent, or cannot run anything."""
        ready = {beat.instance for beat in self._peers.alive("scheduler") if beat.ready}
        try:
            stocked = await self._store.nonempty_queues(self._model)
        except BusError as error:
            _log.warning("queues_unknown", reason=str(error))
            return self._wanted - self._own
        targets = ready | {self._instance, subjects.ANY}
        return {queue for queue in stocked if queue.rpartition(".")[2] not in targets}
