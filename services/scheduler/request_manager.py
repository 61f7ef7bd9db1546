"""The requests of this scheduler: pulled from work queues, attached to their detokenizers, then given to the policy."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby

import msgspec
import structlog

from pagewire.services.scheduler.attacher import ATTACH_TIMEOUT, LOOK_EVERY, Attacher
from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.services.scheduler.item_acks import ItemAcks
from pagewire.services.scheduler.policy.beam_search.beam_scheduler import BeamGroup
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.recent_prefixes import RecentPrefixes
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.suspects import Suspects
from pagewire.services.scheduler.request import Request, Stage, sequences_of
from pagewire.services.scheduler.service_meter import ServiceMeter
from pagewire.services.scheduler.spans import accept, enter
from pagewire.services.scheduler.work_consumer import WorkConsumer
from pagewire.shared import subjects
from pagewire.shared.bus import Item
from pagewire.shared.errors import BusError, Internal, InvalidRequest, RequestError, WireVersionError
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.attach import Attached, AttachState
from pagewire.shared.messages.open import AbortStream
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.process.context import Context
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.polling import poll

LOOKAHEAD = 8
"""Requests of each queue that may wait here, so that no slot waits for a queue and the policy can compare requests."""
RENEW_EVERY = 0.5
"""Seconds between renewals: a quarter of the queue's redelivery time."""
MAX_DELIVERIES = 5
"""Deliveries without a detokenizer after which a request is given up, because no service could report its result."""

_log = structlog.get_logger()
_work = Decoder(WorkItem)


class RequestManager:
    """The requests that this scheduler holds, by their own ids and by those of their unfinished sequences."""

    def __init__(self, context: Context, peers: Peers, model: str, on_change: Callable[[], None]) -> None:
        """`model` is the model's token in subjects; `on_change` is called when the policy has more to run."""
        self.requests: dict[str, Request] = {}
        self.by_sequence: dict[int, Request] = {}
        self.policy: Policy | None = None
        self.meter = ServiceMeter(time.monotonic())
        self._context = context
        self._bus = context.bus
        self._store = context.bus.store
        self._acks = ItemAcks(self._store)
        self._detokenizers = Detokenizers(context.bus)
        self._attacher = Attacher(context, self._detokenizers)
        self.consumer = WorkConsumer(self._store, peers, model, context.instance, self._capacity, self._on_item)
        self._on_change = on_change
        self._prefixes = RecentPrefixes(0)
        self._suspects = Suspects()
        self._trial_lengths: dict[int, int] = {}
        """Tokens that the sequences of the request on trial had at its beginning, by sequence."""
        self._tasks: asyncio.TaskGroup | None = None
        self._num_tasks = 0
        self._last_sequence = 0
        self._last_arrival = 0

    async def run(self) -> None:
        """Pulls and renews until cancelled."""
        await self._detokenizers.listen()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._renew())
            self._tasks.create_task(self._watch_detokenizers())
            await self.consumer.run()

    def start_term(self, policy: Policy, executor: str) -> None:
        """Begins a term: all requests are attached again and wait for the new executor.

        If a request is on trial, only that one is.
        """
        self.policy = policy
        self._attacher.start_term(policy, executor)
        self._suspects.retain(self.requests)
        limits = policy.limits
        self._prefixes = RecentPrefixes(limits.cached_positions)
        for request in self.requests.values():
            self._spawn(self._attach(request))
        self.consumer.notify()

    def end_term(self) -> None:
        """Ends the term. Nothing is pulled until the next term begins."""
        self.meter.metrics.end_term(self.policy)
        self.policy = None
        self._attacher.end_term()
        self._trial_lengths = {}

    def on_failed_step(self, sequences: Iterable[int]) -> None:
        """Ends the request that has made a step fail; if it cannot be known yet, suspects run alone in later terms."""
        by_id = self.policy.sequences.by_id if self.policy is not None else {}
        owners = [self._owner(by_id[i]) if i in by_id else "" for i in sequences]
        self._end_guilty(self._suspects.step_failed({*owners} - {""}, strangers="" in owners))

    def on_executor_lost(self) -> None:
        """Does the same for the requests that had slots when an executor was lost, if it happens to them again."""
        lengths: Counter[str] = Counter()
        for sequence in self.policy.running if self.policy is not None else ():
            if owner := self._owner(sequence):
                lengths[owner] += len(sequence.tokens)
        self._end_guilty(self._suspects.executor_lost(lengths))

    def end_trial(self) -> bool:
        """Returns whether there was a trial and it has ended well. The next term continues with the others."""
        name = self._suspects.on_trial
        if self.policy is None or not name:
            return False
        request = self.requests.get(name)
        if request is not None:
            if not self._trial_lengths:
                return False  # it is still being attached
            unfinished = [s for s in request.sequences if s.id in request.unfinished]
            if any(len(s.tokens) == self._trial_lengths[s.id] for s in unfinished):
                return False
        self._suspects.clear(name)
        return True

    def on_finished(self, sequences: Iterable[int], *, unread: bool = False) -> None:
        """Forgets the requests whose last sequence has ended. The detokenizer ends their items.

        `unread` says that the detokenizer may not know of it: it can still need the tokens that are known here.
        """
        for sequence in sequences:
            request = self.by_sequence.pop(sequence, None)
            if request is not None:
                ended = request.sequences[sequence - request.sequences[0].id]
                self._prefixes.add(ended.tokens, ended.cache_salt)
                request.unfinished.discard(sequence)
                if not request.unfinished:
                    self.meter.end(request)
                    if unread and self.policy is not None:
                        request.ended_at = self.policy.term, self.policy.step
                    else:
                        self._forget(request)
        self.consumer.notify()

    def attach_again(self, sequences: Iterable[int]) -> int:
        """Attaches requests again, whose detokenizer has missed tokens; returns how many of the sequences are known."""
        wanted = set(sequences)
        known = 0
        for request in self.requests.values():
            ours = wanted.intersection(sequence.id for sequence in request.sequences)
            known += len(ours)
            if ours and not request.attaching:
                self._spawn(self._attach_running(request, lost=True))
        return known

    def on_beams_finished(self, groups: Iterable[BeamGroup]) -> None:
        """Sends the results of beam searches to the detokenizers."""
        for group in groups:
            request = self.by_sequence.get(group.choices[0].id)
            if request is not None:
                self._spawn(self._send_result(request, [choice.id for choice in group.choices]))

    def cached_prefixes(self) -> CachedPrefixes | None:
        """Returns what the tokenizers are told; None while nothing can run here."""
        if self.policy is None:
            return None
        return CachedPrefixes(self._context.instance, self.policy.limits.max_running, self._prefixes.packed())

    @property
    def idle(self) -> bool:
        """Whether there is no request, and none arrives."""
        return not self.requests and not self._num_tasks

    def stop_admission(self) -> None:
        """Pulls nothing more and gives no more slots in this term."""
        if self.policy is not None:
            self.policy.admits = False

    async def stop_pulling(self) -> None:
        """Pulls nothing more, for good; returns when the requests that have arrived are attached."""
        await self.consumer.stop()
        await poll(lambda: not self._num_tasks)

    async def return_waiting(self) -> None:
        """Returns the items of the requests that have had no slot yet to their queues, for another scheduler."""
        for request in [request for request in self.requests.values() if request.queued]:
            self._abort(request)
            self._forget(request)
            await self._acks.give_back(request.ack)

    async def hand_back(self) -> None:
        """Returns every item to its queue, for another scheduler."""
        held = list(self.requests.values())
        self._suspects.retain(())
        self.requests.clear()
        self.by_sequence.clear()
        for request in held:
            enter(request, Stage.ENDED, end="handed_back")
            await self._acks.give_back(request.ack)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the request manager does not run")
        self._num_tasks += 1
        self._tasks.create_task(work).add_done_callback(self._on_done)

    def _on_done(self, _: "asyncio.Task[None]") -> None:
        self._num_tasks -= 1
        self.consumer.notify()

    def _capacity(self, queue: str) -> int:
        """Returns how many items of a queue may come: as many as are sure to run, and a few to choose from."""
        if self.policy is None or not self.policy.admits or self._suspects.on_trial:
            return 0
        free = max(0, self.policy.limits.max_running - self.policy.num_unfinished)
        waiting = sum(r.queued and r.queue == queue and bool(r.unfinished) for r in self.requests.values())
        return min(LOOKAHEAD, free + LOOKAHEAD - waiting - self._num_tasks)

    def _on_item(self, queue: str, item: Item) -> None:
        takes = self.policy is not None and self.policy.admits
        self._spawn(self._accept(queue, item) if takes else self._acks.give_back(item.ack))

    async def _renew(self) -> None:
        """Keeps the items of all requests from being delivered again."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            for request in list(self.requests.values()):
                await self._acks.renew(request.ack, request.work.request_id)

    async def _accept(self, queue: str, item: Item) -> None:
        """Accepts a delivery. Requests are keyed by their id: a second delivery only brings a newer ack."""
        try:
            work = _work.decode(item.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("item_unreadable", reason=str(error))
            await self._acks.end(item.ack)
            return
        request = self.requests.get(work.request_id)
        if request is not None:
            await self._update(request, item, work)
            return
        late = work.deadline <= time.time()  # the detokenizer tells the client by itself
        if late or (item.deliveries > 1 and await self._is_done(work.request_id)):
            await self._acks.end(item.ack)
            return
        request = Request(work, queue, item.ack, item.deliveries, item.headers.get("traceparent", ""), item.stored_at)
        accept(request)
        self.requests[work.request_id] = request
        await self._attach(request)

    async def _update(self, request: Request, item: Item, work: WorkItem) -> None:
        """Updates a request by another delivery: with a newer ack, or with the detokenizer that its client has now."""
        if work.detokenizer != request.work.detokenizer:
            if item.stored_at < request.stored_at:
                await self._acks.end(item.ack)  # the client has sent the request again since, to another detokenizer
                return
            await self._acks.end(request.ack)
            request.work, request.stored_at = work, item.stored_at
            request.detokenizer, request.must_open = work.detokenizer, False
        request.ack, request.generation = item.ack, item.deliveries
        if request.sequences and not request.attaching:
            await self._attach_running(request)

    async def _watch_detokenizers(self) -> None:
        """Has the streams of detokenizers that are gone adopted, and forgets what their detokenizers have read."""
        while True:
            await self._detokenizers.wait(LOOK_EVERY)
            self._detokenizers.note_beats()
            owners = {request.detokenizer for request in self.requests.values()}
            gone = {owner for owner in owners if self._detokenizers.must_move(owner)}
            for request in list(self.requests.values()):
                if request.attaching or not request.sequences:
                    continue
                if request.detokenizer in gone and request.work.opening:
                    self._spawn(self._attach_running(request))
                elif request.ended_at and self._detokenizers.has_read(request.detokenizer, *request.ended_at):
                    self._forget(request)

    async def _attach_running(self, request: Request, *, lost: bool = False) -> None:
        """Tells the detokenizer again which sequences a request is, and all tokens that are known here.

        `lost` says that the detokenizer has lost tokens. Those whose log-probabilities it needs are generated again.
        """
        policy = self.policy
        sequences, told, moves = request.sequences, request.generated(), request.moves
        answer = await self._send_attach(request, sequences[0].id, running=True)
        if answer is None or self.policy is not policy or request.sequences is not sequences:
            return
        over = [sequences[index].id for index in unpack(answer.ended)]
        misses = any(len(theirs) < len(ours) for ours, theirs in zip(told, answer.tokens, strict=False))
        if request.reports and misses and (lost or request.moves != moves):
            self._abort(request)
            await self._attach(request)
            return
        if answer.state != AttachState.OPEN:
            over = list(request.unfinished)
        for sequence in over:
            if policy is not None:
                policy.abort(sequence)
        self.on_finished(over)
        if answer.state != AttachState.OPEN:
            self._forget(request)
        self._on_change()

    async def _attach(self, request: Request) -> None:
        """Agrees with the detokenizer on the known tokens, then gives the unfinished sequences to the policy."""
        policy = self.policy
        if policy is None or not self._suspects.may_run(request.work.request_id):
            return  # a later term attaches it
        if request.work.sampling.beam_width:
            longest = max(map(len, request.work.prompts)) // 4
            if reason := policy.limits.beam_search_error(longest, request.work.sampling):
                await self._refuse(request, InvalidRequest(reason))
                return
        first = self._last_sequence + 1
        self._last_sequence += request.num_choices
        answer = await self._send_attach(request, first)
        if self.policy is not policy or self.requests.get(request.work.request_id) is not request:
            return  # the term ended meanwhile, or the item was handed back
        if answer is None or answer.state != AttachState.OPEN:
            self._forget(request)
            unheard = answer is None or answer.state == AttachState.UNKNOWN
            if unheard and request.generation >= MAX_DELIVERIES:
                _log.error("request_given_up", request_id=request.work.request_id, deliveries=request.generation)
                await self._acks.end(request.ack)
            self._on_change()
            return
        self._last_arrival += 1
        for sequence in request.sequences:
            self.by_sequence.pop(sequence.id, None)
        request.sequences = sequences_of(request, first, answer, self._last_arrival)
        unfinished = [sequence for sequence in request.sequences if sequence.state is SequenceState.WAITING]
        request.unfinished = {sequence.id for sequence in unfinished}
        if not unfinished:
            self._forget(request)
            return
        if self._suspects.on_trial:
            self._trial_lengths = {sequence.id: len(sequence.tokens) for sequence in unfinished}
        for sequence in unfinished:
            self.by_sequence[sequence.id] = request
            self._prefixes.add(sequence.tokens, sequence.cache_salt)
        if request.work.sampling.beam_width:
            for _, choices in groupby(unfinished, key=lambda sequence: sequence.prompt_index):
                policy.beam_search.add(list(choices))
        else:
            for sequence in unfinished:
                policy.add(sequence)
        self._on_change()

    async def _send_result(self, request: Request, choices: list[int]) -> None:
        """Sends the result of a beam search. If no detokenizer takes it, the item is delivered and searched again."""
        policy = self.policy
        answer = await self._send_attach(request, request.sequences[0].id, running=True)
        if self.policy is not policy or self.by_sequence.get(choices[0]) is not request:
            return  # the term ended meanwhile, or the request
        if answer is None or answer.state == AttachState.UNKNOWN:
            self._abort(request)
            self._forget(request)
            self._on_change()
        else:
            self.on_finished(choices)

    def _abort(self, request: Request) -> None:
        """Has the policy abort the unfinished sequences of a request."""
        if self.policy is not None:
            for sequence in list(request.unfinished):
                self.policy.abort(sequence)

    def _owner(self, sequence: Sequence) -> str:
        """Returns the id of the request that a sequence of the policy belongs to; empty if it has ended."""
        request = self.by_sequence.get(sequence.caller_ids[0])
        return request.work.request_id if request is not None else ""

    def _end_guilty(self, name: str) -> None:
        request = self.requests.get(name)
        if request is not None:
            _log.error("request_fails_alone", request_id=name)
            self._forget(request)
            failed = Internal("the model fails on this request, also when the request runs alone: change the request")
            self._spawn(self._refuse(request, failed))

    async def _refuse(self, request: Request, error: RequestError) -> None:
        """Ends a request that cannot run. If its detokenizer does not answer, the item is delivered again."""
        abort = AbortStream(request.work.request_id, error.kind, error.message)
        subject = f"{subjects.DETOKENIZER}.{request.detokenizer}.abort"
        self._forget(request)
        try:
            await self._bus.request(subject, encode(abort), timeout=ATTACH_TIMEOUT)
        except BusError as unheard:
            _log.warning("detokenizer_unreachable", request_id=request.work.request_id, reason=str(unheard))
        else:
            await self._acks.end(request.ack)

    async def _send_attach(self, request: Request, first_sequence: int, *, running: bool = False) -> Attached | None:
        """See `Attacher.attach`."""
        return await self._attacher.attach(
            request,
            first_sequence,
            lambda: self.requests.get(request.work.request_id) is request,
            running=running,
        )

    async def _is_done(self, request_id: str) -> bool:
        try:
            return await self._store.get_done(request_id) is not None
        except BusError:
            return False  # then the detokenizer tells when it is attached

    def _forget(self, request: Request) -> None:
        """Stops renewing a request. Unless the detokenizer ends its item, the item is delivered again."""
        if self.requests.get(request.work.request_id) is request:
            del self.requests[request.work.request_id]
        for sequence in request.sequences:
            self.by_sequence.pop(sequence.id, None)
