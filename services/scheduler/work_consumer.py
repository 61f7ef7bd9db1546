"""Pulls work from queues: from this scheduler's own, from those of any replica, and from those of dead replicas."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Item, Store
from pagewire.shared.errors import BusError
from pagewire.shared.process.peers import SILENCE, Peers

PULL_EXPIRES = 2.0
"""Seconds that a pull waits at the queue. A frozen consumer takes new items out of the queue for no longer."""
LOOK_EVERY = 1.0
"""Seconds between two checks of the queues: for those that no other replica consumes, and those that stand still."""
RETRY_AFTER = 0.5
"""Seconds until a queue that could not be reached is pulled again."""

_log = structlog.get_logger()


@dataclass(eq=False)
class WorkConsumer:
    """One pull per queue, each for as many items as there is room for, so that no queue waits for another."""

    store: Store
    peers: Peers
    model: str
    """Token of the served model."""
    instance: str
    capacity: Callable[[str], int]
    """Returns how many items of a queue could be taken now."""
    held: Callable[[str], int]
    """Returns how many items of a queue this scheduler has."""
    on_item: Callable[[str, Item], None]
    """Takes an item of a queue."""

    def __post_init__(self) -> None:
        self._has_capacity = asyncio.Event()
        self._replicas_changed = asyncio.Event()
        self._ready: set[str] = set()
        self._stopped = False
        self._pulls: set[asyncio.Task[None]] = set()
        self._own = {*subjects.work_queues(self.model, self.instance), *subjects.work_queues(self.model, subjects.ANY)}
        self._wanted = set(self._own)
        self._pulled: set[str] = set()
        self._lengths: Mapping[str, int] = {}
        """Number of items in each queue, as of the last look."""
        self._empty: set[str] = set()
        """Queues whose last pull has waited in vain."""
        self._suspects: dict[str, float] = {}
        """Queues that held items and delivered none in the last look, each with the time of the first such look."""
        self.problem = ""
        """Why items are not delivered, in words; empty: they are."""

    def notify(self) -> None:
        """Says that there may be capacity again."""
        self._has_capacity.set()
        self._has_capacity.clear()

    def _on_peers(self) -> None:
        """Looks for the queues of a replica as soon as it is no longer ready."""
        ready = self._ready_replicas()
        if ready != self._ready:
            self._ready = ready
            self._replicas_changed.set()

    async def stop(self) -> None:
        """Ends all pulls for good; returns when no further item can arrive."""
        self._stopped = True
        pulls = set(self._pulls)
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)

    async def run(self) -> None:
        """Pulls until cancelled."""
        await self.peers.listen("scheduler", self._on_peers)
        async with asyncio.TaskGroup() as tasks:
            self._start(tasks)
            await asyncio.sleep(SILENCE)  # every live replica has sent a heartbeat by then
            tasks.create_task(self._mend_queues())
            while True:
                await self._look()
                self._start(tasks)
                self._replicas_changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await self._replicas_changed.wait()

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        if self._stopped:
            return
        for queue in self._wanted - self._pulled:
            self._pulled.add(queue)
            pull = tasks.create_task(self._pull(queue))
            self._pulls.add(pull)
            pull.add_done_callback(self._pulls.discard)

    async def _pull(self, queue: str) -> None:
        try:
            while queue in self._wanted:
                if (count := self.capacity(queue)) <= 0:
                    self._empty.discard(queue)
                    await self._has_capacity.wait()
                    continue
                try:
                    items = await self.store.pull_work(queue, count, expires=PULL_EXPIRES)
                except BusError as error:
                    _log.warning("queue_unreachable", queue=queue, reason=str(error), retry_in=RETRY_AFTER)
                    await asyncio.sleep(RETRY_AFTER)
                    continue
                (self._empty.discard if items else self._empty.add)(queue)
                for item in items:
                    self.on_item(queue, item)
        finally:
            self._pulled.discard(queue)
            self._empty.discard(queue)

    async def _look(self) -> None:
        """Pulls from now on also the queues of replicas that are silent or cannot run anything."""
        try:
            lengths = await self.store.queue_lengths(subjects.all_work(self.model))
        except BusError as error:
            _log.warning("queues_unknown", reason=str(error))
            return
        targets = self._ready_replicas() | {self.instance, subjects.ANY}
        orphans = {queue for queue in lengths.items if queue.rpartition(".")[2] not in targets}
        self._wanted = self._own | orphans
        self._lengths = lengths.items

    async def _mend_queues(self) -> None:
        """Has queues that stand still deliver their items anew, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            await self._mend_standing()

    async def _mend_standing(self) -> None:
        """Mends the queues that hold items in two checks in a row though a pull waits there and nobody has them.

        In a cluster a queue has the time of an election: to create its consumer anew meanwhile is no help, and a
        consumer that is created while servers go and come may be left without a leader.
        """
        now, before = time.monotonic(), self._suspects
        waiting = [queue for queue in self._empty if self._lengths.get(queue, 0) > self.held(queue)]
        answers = await asyncio.gather(*map(self._is_suspect, waiting))
        suspects = [queue for queue, suspect in zip(waiting, answers, strict=True) if suspect]
        self._suspects = {queue: before.get(queue, now) for queue in suspects}
        overdue = now - self.store.election_time
        standing = sorted(queue for queue, since in self._suspects.items() if queue in before and since <= overdue)
        for queue in standing:
            _log.error("queue_stands_still", queue=queue)
            try:
                await self.store.deliver_anew(queue)
            except BusError as error:
                _log.warning("queue_not_mended", queue=queue, reason=str(error), retry_in=LOOK_EVERY)
            else:
                del self._suspects[queue]  # further checks judge what that has changed
        if standing:
            self.problem = f"the queue {standing[0]} holds requests and delivers none"
        elif not self._suspects:
            self.problem = ""

    async def _is_suspect(self, queue: str) -> bool:
        """Returns whether a queue holds items that nobody has; if the store does not say so now, what was so before."""
        try:
            return await self.store.undelivered(queue) > 0
        except BusError as error:
            _log.warning("queue_unknown", queue=queue, reason=str(error))
            return queue in self._suspects

    def _ready_replicas(self) -> set[str]:
        return {beat.instance for beat in self.peers.alive("scheduler") if beat.ready}
