"""Where requests come from: the work queues. Each is attached to its detokenizer before the policy hears of it."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby

import msgspec
import structlog

from pagewire.services.scheduler.drain import DrainRate
from pagewire.services.scheduler.policy import Policy
from pagewire.services.scheduler.pulls import Pulls
from pagewire.services.scheduler.recent_prefixes import RecentPrefixes
from pagewire.services.scheduler.request import Request, accept, sequences_of
from pagewire.services.scheduler.searches import Search
from pagewire.services.scheduler.sequence import State
from pagewire.shared import subjects
from pagewire.shared.bus import Item
from pagewire.shared.context import Context
from pagewire.shared.errors import BusError, InvalidRequest, WireVersionError
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.open import AbortStream
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.peers import Peers

LOOKAHEAD = 8
"""Requests of each queue that may wait here, so that no slot waits for a queue, and the first of each are compared."""
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

    def __init__(self, context: Context, peers: Peers, model: str, changed: Callable[[], None]) -> None:
        """`model` is the model's token in subjects; `changed` is called when the policy has more to run."""
        self.requests: dict[str, Request] = {}
        self.by_sequence: dict[int, Request] = {}
        self.policy: Policy | None = None
        self.drain = DrainRate(time.monotonic())
        self._context = context
        self._bus = context.bus
        self._store = context.bus.store
        self._pulls = Pulls(self._store, peers, model, context.instance, self._count_room, self._take)
        self._changed = changed
        self._cached = RecentPrefixes(0)
        self._executor = ""
        self._tasks: asyncio.TaskGroup | None = None
        self._admitting = 0
        self._sequences = 0
        self._arrivals = 0

    async def run(self) -> None:
        """Pulls and renews until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._renew())
            await self._pulls.run()

    def begin(self, policy: Policy, executor: str) -> None:
        """A new term: everything held is attached again and waits for the new executor."""
        self.policy, self._executor = policy, executor
        limits = policy.limits
        self._cached = RecentPrefixes(limits.num_blocks * limits.block_size if limits.prefix_cache else 0)
        for request in self.requests.values():
            self._spawn(self._attach(request))
        self._pulls.retry()

    def pause(self) -> None:
        """The executor is lost: nothing is pulled until the next term begins."""
        self.policy = None

    def begun(self) -> None:
        """Some that waited here have a slot: others may come and wait."""
        self._pulls.retry()

    def ended(self, sequences: Iterable[int]) -> None:
        """Forgets the requests whose last sequence is over. The detokenizer ends their items."""
        for sequence in sequences:
            request = self.by_sequence.pop(sequence, None)
            if request is not None:
                self._cached.use(request.find(sequence).tokens, request.work.cache_salt)
                request.live.discard(sequence)
                if not request.live and self.requests.pop(request.work.request_id, None) is not None:
                    self.drain.ended(1, time.monotonic())
        self._pulls.retry()

    def conclude(self, searches: Iterable[Search]) -> None:
        """Beam searches have ended: the detokenizers take over what they found."""
        for search in searches:
            request = self.by_sequence.get(search.choices[0].id)
            if request is not None:
                self._spawn(self._tell(request, [choice.id for choice in search.choices]))

    def cached(self) -> CachedPrefixes | None:
        """What the tokenizers are told; None while nothing can run here."""
        if self.policy is None:
            return None
        return CachedPrefixes(self._context.instance, self.policy.limits.max_running, self._cached.packed())

    async def hand_back(self) -> None:
        """Returns every item to the queue, for another scheduler."""
        held = list(self.requests.values())
        self.requests.clear()
        self.by_sequence.clear()
        for request in held:
            await self._return(request.ack)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the intake does not run")
        self._admitting += 1
        self._tasks.create_task(work).add_done_callback(self._spawned)

    def _spawned(self, _: "asyncio.Task[None]") -> None:
        self._admitting -= 1
        self._pulls.retry()

    def _count_room(self, queue: str) -> int:
        """Items of a queue that may come now: as many as are sure to run, and a few of each queue to choose from."""
        if self.policy is None:
            return 0
        free = max(0, self.policy.limits.max_running - self.policy.live)
        waiting = sum(request.waits and request.queue == queue for request in self.requests.values())
        return min(LOOKAHEAD, free + LOOKAHEAD - waiting - self._admitting)

    def _take(self, queue: str, item: Item) -> None:
        self._spawn(self._admit(queue, item) if self.policy is not None else self._return(item.ack))

    async def _renew(self) -> None:
        """Keeps the items of everything held from being delivered again."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            for request in list(self.requests.values()):
                try:
                    await self._store.renew_work(request.ack)
                except BusError as error:
                    _log.warning("item_not_renewed", request_id=request.work.request_id, reason=str(error))

    async def _return(self, ack: str) -> None:
        try:
            await self._store.return_work(ack)
        except BusError as error:
            _log.warning("item_not_returned", reason=str(error))  # it is delivered again, a little later

    async def _admit(self, queue: str, item: Item) -> None:
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
        request = self.requests[work.request_id] = accept(queue, item, work)
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
        if request.work.sampling.beam_width:
            longest = max(map(len, request.work.prompts)) // 4
            if obstacle := policy.limits.obstacle(longest, request.work.sampling):
                await self._refuse(request, InvalidRequest(obstacle))
                return
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
            self._cached.use(sequence.tokens, sequence.cache_salt)
        if request.work.sampling.beam_width:
            for _, choices in groupby(live, key=lambda sequence: sequence.prompt_index):
                policy.search(list(choices))
        else:
            for sequence in live:
                policy.add(sequence)
        self._changed()

    async def _tell(self, request: Request, choices: list[int]) -> None:
        """Hands the result of a beam search over. If nobody takes it, the item is delivered and searched again."""
        policy = self.policy
        answer = await self._bind(request, request.sequences[0].id)
        if self.policy is not policy or self.by_sequence.get(choices[0]) is not request:
            return  # the term ended meanwhile, or the request
        if answer is None or answer.state == AttachState.UNKNOWN:
            self._give_up(request)
        else:
            self.ended(choices)

    async def _refuse(self, request: Request, error: InvalidRequest) -> None:
        """Ends a request that cannot run here. If its detokenizer does not hear of it, the item is delivered again."""
        abort = AbortStream(request.work.request_id, error.kind, error.message)
        subject = f"{subjects.DETOKENIZER}.{request.work.detokenizer}.abort"
        self._forget(request)
        try:
            await self._bus.request(subject, encode(abort), timeout=ATTACH_TIMEOUT)
        except BusError as unheard:
            _log.warning("detokenizer_unreachable", request_id=request.work.request_id, reason=str(unheard))
        else:
            await self._end(request.ack)

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

    def _give_up(self, request: Request) -> None:
        """Nothing of it runs any more, and it is forgotten."""
        for sequence in request.live:
            if self.policy is not None:
                self.policy.drop(sequence)
        self._forget(request)
        self._changed()

    def _forget(self, request: Request) -> None:
        """No longer renewed: unless the detokenizer ends the item, it is delivered again."""
        if self.requests.get(request.work.request_id) is request:
            del self.requests[request.work.request_id]
        for sequence in request.sequences:
            self.by_sequence.pop(sequence.id, None)
