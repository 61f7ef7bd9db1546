"""Where requests come from: the work queue. Each is attached to its detokenizer before the policy hears of it."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

import msgspec
import structlog

from services.scheduler.policy import Policy
from services.scheduler.request import Request, accept, sequences_of
from services.scheduler.sequence import State
from shared import subjects
from shared.bus import Item
from shared.context import Context
from shared.errors import BusError, WireVersionError
from shared.messages import Decoder, encode
from shared.messages.attach import Attach, Attached, AttachState
from shared.messages.work import WorkItem

LOOKAHEAD = 8
"""Requests pulled beyond those that can run, so that a slot never waits for the queue."""
PULL_EXPIRES = 2.0
"""Seconds that a pull waits at the queue. A frozen puller swallows new items for no longer."""
RENEW_EVERY = 0.5
"""Seconds between renewals: a quarter of the queue's redelivery time."""
ATTACH_TIMEOUT = 1.0
"""Seconds that a detokenizer has to answer. After that the item is delivered again."""
MAX_DELIVERIES = 5
"""Deliveries without a detokenizer after which a request is given up: nobody is left to tell."""

_log = structlog.get_logger()
_work = Decoder(WorkItem)
_attached = Decoder(Attached)


class Intake:
    """The requests that this scheduler holds, and the policy that runs them while there is an executor."""

    def __init__(self, context: Context, model: str, changed: Callable[[], None]) -> None:
        self.requests: dict[str, Request] = {}
        self.by_sequence: dict[int, Request] = {}
        self.policy: Policy | None = None
        self._context = context
        self._bus = context.bus
        self._store = context.bus.store
        self._model = model
        self._changed = changed
        self._executor = ""
        self._tasks: asyncio.TaskGroup | None = None
        self._admitting = 0
        self._room = asyncio.Event()
        self._sequences = 0
        self._arrivals = 0

    async def run(self) -> None:
        """Pulls and renews until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._renew())
            while True:
                await self._room.wait()
                room = self._count_room()
                if room <= 0:
                    self._room.clear()
                    continue
                for item in await self._pull(room):
                    self._spawn(self._admit(item))

    def begin(self, policy: Policy, executor: str) -> None:
        """A new term: everything held is attached again and waits for the new executor."""
        self.policy, self._executor = policy, executor
        for request in self.requests.values():
            self._spawn(self._attach(request))
        self._room.set()

    def pause(self) -> None:
        """The executor is lost: nothing is pulled until the next term begins."""
        self.policy = None

    def ended(self, sequences: Iterable[int]) -> None:
        """Forgets the requests whose last sequence is over. The detokenizer ends their items."""
        for sequence in sequences:
            request = self.by_sequence.pop(sequence, None)
            if request is not None:
                request.live.discard(sequence)
                if not request.live:
                    self.requests.pop(request.work.request_id, None)
        self._room.set()

    async def hand_back(self) -> None:
        """Returns every item to the queue, for another scheduler."""
        held = list(self.requests.values())
        self.requests.clear()
        self.by_sequence.clear()
        for request in held:
            try:
                await self._store.return_work(request.ack)
            except BusError as error:
                _log.warning("item_not_returned", request_id=request.work.request_id, reason=str(error))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the intake does not run")
        self._admitting += 1
        self._tasks.create_task(work).add_done_callback(self._spawned)

    def _spawned(self, _: "asyncio.Task[None]") -> None:
        self._admitting -= 1
        self._room.set()

    def _count_room(self) -> int:
        if self.policy is None:
            return 0
        return self.policy.limits.max_running + LOOKAHEAD - self.policy.live - self._admitting

    async def _pull(self, count: int) -> list[Item]:
        try:
            return await self._store.pull_work(self._model, count, expires=PULL_EXPIRES)
        except BusError as error:
            _log.warning("queue_unreachable", reason=str(error), retry_in=RENEW_EVERY)
            await asyncio.sleep(RENEW_EVERY)
            return []

    async def _renew(self) -> None:
        """Keeps the items of everything held from being delivered again."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            for request in list(self.requests.values()):
                try:
                    await self._store.renew_work(request.ack)
                except BusError as error:
                    _log.warning("item_not_renewed", request_id=request.work.request_id, reason=str(error))

    async def _admit(self, item: Item) -> None:
        """Takes in one delivery. Admission is keyed by request id: a second delivery only brings a newer ack."""
        try:
            work = _work.decode(item.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("item_unreadable", reason=str(error))
            await self._end(item.ack)
            return
        request = self.requests.get(work.request_id)
        if request is not None:
            await self._take_over(request, item, work)
            return
        if item.deliveries > 1 and await self._is_done(work.request_id):
            await self._end(item.ack)
            return
        request = self.requests[work.request_id] = accept(item, work)
        await self._attach(request)

    async def _take_over(self, request: Request, item: Item, work: WorkItem) -> None:
        """Another delivery of a request that runs here: its newer ack, or the detokenizer that its client has now."""
        if work.detokenizer != request.work.detokenizer:
            if item.stored_at < request.stored_at:
                await self._end(item.ack)  # the client has sent it again since, and another detokenizer speaks to it
                return
            await self._end(request.ack)
            request.work, request.stored_at = work, item.stored_at
        request.ack, request.generation = item.ack, item.deliveries
        if request.sequences:
            await self._bind(request, request.sequences[0].id)

    async def _attach(self, request: Request) -> None:
        """Agrees with the detokenizer on what is known, then lets the policy run what is left."""
        policy = self.policy
        if policy is None:
            return  # the next term attaches it
        first = self._sequences + 1
        self._sequences += request.choices
        answer = await self._bind(request, first)
        if self.policy is not policy or self.requests.get(request.work.request_id) is not request:
            return  # the term ended meanwhile, or the item was handed back
        if answer is None or answer.state == AttachState.UNKNOWN:
            self._forget(request)
            if request.generation >= MAX_DELIVERIES:
                _log.error("request_given_up", request_id=request.work.request_id, deliveries=request.generation)
                await self._end(request.ack)
            return
        if answer.state == AttachState.ENDED:
            self._forget(request)
            return
        self._arrivals += 1
        for sequence in request.sequences:
            self.by_sequence.pop(sequence.id, None)
        request.sequences = sequences_of(request, first, answer, self._arrivals)
        live = [sequence for sequence in request.sequences if sequence.state is State.WAITING]
        request.live = {sequence.id for sequence in live}
        if not live:
            self._forget(request)
            return
        for sequence in live:
            self.by_sequence[sequence.id] = request
            policy.add(sequence)
        self._changed()

    async def _bind(self, request: Request, first_sequence: int) -> Attached | None:
        """Tells the detokenizer which sequences the request is; its answer, or None when it is not there."""
        message = Attach(
            request_id=request.work.request_id,
            term=self.policy.term if self.policy else 0,
            generation=request.generation,
            scheduler=self._context.instance,
            executor=self._executor,
            ack=request.ack,
            first_sequence=first_sequence,
            tokens=request.generated(),
            finishes=bytes(sequence.finish for sequence in request.sequences),
        )
        subject = f"{subjects.DETOKENIZER}.{request.work.detokenizer}.attach"
        try:
            reply = await self._bus.request(subject, encode(message), timeout=ATTACH_TIMEOUT)
            return _attached.decode(reply.data)
        except (BusError, WireVersionError, msgspec.DecodeError) as error:
            _log.warning("detokenizer_unreachable", request_id=request.work.request_id, reason=str(error))
            return None

    async def _is_done(self, request_id: str) -> bool:
        try:
            return await self._store.get_done(request_id) is not None
        except BusError:
            return False  # then the detokenizer tells when it is attached

    async def _end(self, ack: str) -> None:
        try:
            await self._store.end_work(ack)
        except BusError as error:
            _log.warning("item_not_ended", reason=str(error))  # it is delivered again

    def _forget(self, request: Request) -> None:
        """No longer renewed: unless the detokenizer ends the item, it is delivered again."""
        if self.requests.get(request.work.request_id) is request:
            del self.requests[request.work.request_id]
        for sequence in request.sequences:
            self.by_sequence.pop(sequence.id, None)
