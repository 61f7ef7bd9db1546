"""The requests of this scheduler: pulled from work queues, attached to their detokenizers, then given to the policy."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby

import msgspec
import structlog

from pagewire.services.scheduler.attacher import LOOK_EVERY, Attacher
from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.services.scheduler.item_acks import ItemAcks
from pagewire.services.scheduler.item_restorer import ItemRestorer
from pagewire.services.scheduler.metrics import RequestMetrics
from pagewire.services.scheduler.policy.policy import Decision
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.request import Request, Stage, sequences_of
from pagewire.services.scheduler.service_meter import ServiceMeter
from pagewire.services.scheduler.spans import accept, enter, note_preempted
from pagewire.services.scheduler.term import Term
from pagewire.services.scheduler.trials import Trials
from pagewire.services.scheduler.work_consumer import WorkConsumer
from pagewire.shared.bus import Item
from pagewire.shared.errors import Internal, InvalidRequest, RequestError, WireVersionError
from pagewire.shared.messages import Decoder, unpack
from pagewire.shared.messages.attach import Attached, AttachState
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

    def __init__(
        self,
        context: Context,
        peers: Peers,
        detokenizers: Detokenizers,
        meter: ServiceMeter,
        metrics: RequestMetrics,
        model: str,
        on_change: Callable[[], None],
    ) -> None:
        """`model` is the model's token in subjects; `on_change` is called when the policy has more to run."""
        self.requests: dict[str, Request] = {}
        self.term: Term | None = None
        self._by_sequence: dict[int, Request] = {}
        self._last_term: Term | None = None
        """The present term, or the last one."""
        self._meter = meter
        self._metrics = metrics
        self._store = context.bus.store
        self._acks = ItemAcks(self._store)
        self._detokenizers = detokenizers
        self._attacher = Attacher(context, detokenizers)
        instance = context.instance
        self.consumer = WorkConsumer(self._store, peers, model, instance, self._capacity, self._held, self._on_item)
        self.restorer = ItemRestorer(context.bus, model, instance, self.requests)
        self._on_change = on_change
        self._trials = Trials(self.requests, self._by_sequence)
        self._tasks: asyncio.TaskGroup | None = None
        self._num_tasks = 0
        self._last_sequence = 0
        self._last_arrival = 0

    async def run(self) -> None:
        """Pulls and renews until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._renew())
            self._tasks.create_task(self._watch_detokenizers())
            self._tasks.create_task(self.restorer.run())
            await self.consumer.run()

    def start_term(self, term: Term) -> None:
        """Begins a term: all requests are attached again and wait for the new executor.

        If a request is on trial, only that one is.
        """
        self.term = self._last_term = term
        self._trials.retain_held()
        for request in self.requests.values():
            self._spawn(self._attach(request, term))
        self.consumer.notify()

    def end_term(self) -> None:
        """Ends the term. Nothing is pulled until the next term begins."""
        if self.term is not None:
            self._metrics.on_term_end(self.term)
            self.term.ended = True
            self.term = None

    def on_failed_step(self, sequences: Iterable[int], term: Term) -> None:
        """Ends the request that has made a step fail; if it cannot be known yet, suspects run alone in later terms."""
        self._end_guilty(self._trials.step_failed(sequences, term))

    def on_executor_lost(self, term: Term) -> None:
        """Ends the request that the executor was lost with when it ran alone, if there is one."""
        self._metrics.on_executor_lost()
        self._end_guilty(self._trials.executor_lost(term))

    def end_trial(self, term: Term) -> bool:
        """Returns whether there was a trial and it has ended well. The next term continues with the other requests."""
        return self._trials.end(term)

    def on_prefilled(self, sequences: Iterable[Sequence]) -> None:
        """Notes the requests of sequences that have sampled for the first time in their slot."""
        for sequence in sequences:
            request = self._by_sequence.get(sequence.caller_ids[0])
            if request is not None:
                self._metrics.on_first_token(request)

    def on_decision(self, decision: Decision, term: Term) -> None:
        """Notes which sequences have got or lost a slot, and passes on which sequences and beam searches have ended."""
        added = () if decision.plan is None else decision.plan.added
        for add in added:
            sequence = term.policy.sequences.by_id[add.sequence]
            request = self._by_sequence.get(sequence.caller_ids[0])
            if request is None:
                continue
            if request.queued:
                request.queued = False
                self._meter.start(request, time.monotonic())
                self._metrics.on_slot(request, self._store.now())
            if request.stage is not Stage.RUN:
                enter(request, Stage.RUN, cached_tokens=add.computed, executor=term.executor.name)
        if added:
            self.consumer.notify()
        if decision.preempted:
            note_preempted(self._by_sequence, decision.preempted)
        if decision.expired:
            self.on_finished(decision.expired)  # the detokenizer tells their clients
        for search in decision.searches:
            request = self._by_sequence.get(search.choices[0].id)
            if request is not None:
                self._spawn(self._send_result(request, [choice.id for choice in search.choices]))

    def on_finished(self, sequences: Iterable[int], *, ended_at: tuple[int, int] | None = None) -> None:
        """Forgets the requests whose last sequence has ended. The detokenizer ends their items.

        `ended_at` is the term and the step of their last token, if the detokenizer may not have read it: until it has,
        it can still need the tokens that are known here.
        """
        for i in sequences:
            request = self._by_sequence.pop(i, None)
            if request is not None:
                sequence = request.sequences[i - request.sequences[0].id]
                if self.term is not None:
                    self.term.prefixes.add(sequence.tokens, sequence.cache_salt)
                request.unfinished.discard(i)
                if not request.unfinished:
                    self._metrics.on_end(request)
                    self._meter.end(request)
                    request.ended_at = ended_at
                    if ended_at is None:
                        self._forget(request)
        self.consumer.notify()

    def attach_again(self, sequences: Iterable[int]) -> int:
        """Attaches requests again whose detokenizer has missed tokens; returns how many of the sequences are held."""
        ids = set(sequences)
        held = 0
        for request in self.requests.values():
            ours = ids.intersection(sequence.id for sequence in request.sequences)
            held += len(ours)
            request.attach_again |= bool(ours)
            if ours and not request.attaching:
                self._spawn(self._attach_running(request, lost=True))
        return held

    @property
    def idle(self) -> bool:
        """Whether there is no request, and none arrives."""
        return not self.requests and not self._num_tasks

    def stop_admission(self) -> None:
        """Pulls nothing more and gives no more slots in this term."""
        if self.term is not None:
            self.term.policy.stop_admission()

    async def stop_pulling(self) -> None:
        """Pulls nothing more, for good; returns when the requests that have arrived are attached."""
        await self.consumer.stop()
        await poll(lambda: not self._num_tasks)

    async def return_waiting(self) -> None:
        """Returns the items of the requests that have had no slot yet to their queues, for another scheduler."""
        for request in [request for request in self.requests.values() if request.queued]:
            self._abort(request.unfinished)
            self._forget(request)
            await self._acks.give_back(request.ack)

    async def hand_back(self) -> None:
        """Returns every item to its queue, for another scheduler."""
        held = list(self.requests.values())
        self.requests.clear()
        self._by_sequence.clear()
        self._trials.retain_held()
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
        if (term := self.term) is None or not term.policy.admits or self._trials.on_trial:
            return 0
        free = max(0, term.policy.limits.max_running - term.policy.num_unfinished)
        waiting = sum(r.queued and r.queue == queue and bool(r.unfinished) for r in self.requests.values())
        return min(LOOKAHEAD, free + LOOKAHEAD - waiting - self._num_tasks)

    def _held(self, queue: str) -> int:
        return sum(request.queue == queue for request in self.requests.values())

    def _on_item(self, queue: str, item: Item) -> None:
        admits = self.term is not None and self.term.policy.admits
        self._spawn(self._accept(queue, item) if admits else self._acks.give_back(item.ack))

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
            await self._update(request, item, work, queue)
            return
        late = work.deadline <= self._store.now()  # the detokenizer tells the client by itself
        if late or (item.deliveries > 1 and await self._acks.is_done(work.request_id)):
            await self._acks.end(item.ack)
            return
        request = Request.of(item, work, queue)
        accept(request)
        self.requests[work.request_id] = request
        if self.term is not None:  # otherwise the next term attaches it
            await self._attach(request, self.term)

    async def _update(self, request: Request, item: Item, work: WorkItem, queue: str) -> None:
        """Updates a request by another delivery. Of two items of it, the one that was stored last stays."""
        other, ack = item.number != request.number, request.ack
        if other and item.stored_at < request.stored_at:
            await self._acks.end(item.ack)
            return
        moved = request.note_delivery(item, work, queue)
        if other:
            await self._acks.end(ack)
        request.attach_again |= other or moved
        if request.sequences and not request.attaching:
            await self._attach_running(request, lost=moved)

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
        """Sends the detokenizer the sequences of a request again, with all tokens that are known here.

        `lost`: whether it lacks tokens. Those of them whose log-probabilities it needs are generated again.
        """
        term, sequences, tokens, moves = self.term, request.sequences, request.generated(), request.moves
        answer = await self._send_attach(request, sequences[0].id, running=True)
        if answer is None or self.term is not term or request.sequences is not sequences:
            return
        lost |= request.attach_again
        misses = any(len(theirs) < len(ours) for ours, theirs in zip(tokens, answer.tokens, strict=False))
        if request.reports and misses and (lost or request.moves != moves):
            self._abort(request.unfinished)
            if term is not None:
                await self._attach(request, term)
            return
        ended = [sequences[index].id for index in unpack(answer.ended)]
        if answer.state != AttachState.OPEN:
            ended = list(request.unfinished)
        self._abort(ended)
        self.on_finished(ended)
        if answer.state != AttachState.OPEN:
            self._forget(request)
        self._on_change()
        if request.attach_again and not request.attaching:
            await self._attach_running(request, lost=True)

    async def _attach(self, request: Request, term: Term) -> None:
        """Agrees with the detokenizer on the known tokens, then gives the unfinished sequences to the policy."""
        if term.ended or not self._trials.may_run(request):
            return  # a later term attaches it
        policy = term.policy
        if request.work.sampling.beam_width:
            longest = max(map(len, request.work.prompts)) // 4
            if reason := policy.limits.beam_search_error(longest, request.work.sampling):
                await self._refuse(request, InvalidRequest(reason))
                return
        first = self._last_sequence + 1
        self._last_sequence += request.num_choices
        answer = await self._send_attach(request, first)
        if self.term is not term or self.requests.get(request.work.request_id) is not request:
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
            self._by_sequence.pop(sequence.id, None)
        request.sequences = sequences_of(request, first, answer, self._last_arrival)
        unfinished = [sequence for sequence in request.sequences if sequence.state is SequenceState.WAITING]
        request.unfinished = {sequence.id for sequence in unfinished}
        if not unfinished:
            self._forget(request)
            return
        if self._trials.on_trial:
            term.trial_lengths = {sequence.id: len(sequence.tokens) for sequence in unfinished}
        for sequence in unfinished:
            self._by_sequence[sequence.id] = request
            term.prefixes.add(sequence.tokens, sequence.cache_salt)
        if request.work.sampling.beam_width:
            for _, choices in groupby(unfinished, key=lambda sequence: sequence.prompt_index):
                policy.beam_search.add(list(choices))
        else:
            for sequence in unfinished:
                policy.add(sequence)
        self._on_change()
        if request.attach_again and not request.attaching:
            await self._attach_running(request, lost=True)

    async def _send_result(self, request: Request, choices: list[int]) -> None:
        """Sends the result of a beam search. If no detokenizer takes it, the item is delivered and searched again."""
        term = self.term
        answer = await self._send_attach(request, request.sequences[0].id, running=True)
        if self.term is not term or self._by_sequence.get(choices[0]) is not request:
            return  # the term ended meanwhile, or the request
        if answer is None or answer.state == AttachState.UNKNOWN:
            self._abort(request.unfinished)
            self._forget(request)
            self._on_change()
        else:
            self.on_finished(choices)

    def _abort(self, sequences: Iterable[int]) -> None:
        """Has the policy abort sequences, if an executor may run them."""
        if self.term is not None:
            for sequence in sequences:
                self.term.policy.abort(sequence)

    def _end_guilty(self, name: str) -> None:
        if (request := self.requests.get(name)) is not None:
            _log.error("request_fails_alone", request_id=name)
            self._forget(request)
            failed = Internal("the model fails on this request, also when the request runs alone: change the request")
            self._spawn(self._refuse(request, failed))

    async def _refuse(self, request: Request, error: RequestError) -> None:
        """Ends a request that cannot run. If its detokenizer does not answer, the item is delivered again."""
        self._forget(request)
        if await self._attacher.refuse(request, error):
            await self._acks.end(request.ack)

    async def _send_attach(self, request: Request, first_sequence: int, *, running: bool = False) -> Attached | None:
        """Tells the detokenizer the sequences of a request, unless the term ends or the request is forgotten."""
        present, term = self.term, self._last_term
        if term is None:
            return None

        def held() -> bool:
            return self.term is present and self.requests.get(request.work.request_id) is request

        return await self._attacher.attach(request, first_sequence, term, held, running=running)

    def _forget(self, request: Request) -> None:
        """Stops renewing a request. Unless the detokenizer ends its item, the item is delivered again."""
        if self.requests.get(request.work.request_id) is request:
            del self.requests[request.work.request_id]
        for sequence in request.sequences:
            self._by_sequence.pop(sequence.id, None)
