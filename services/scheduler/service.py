"""The scheduler: pulls work while it has room, keeps one executor supplied with plans, and reads its steps."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import structlog

from pagewire.services.scheduler.backlog_reporter import BacklogReporter
from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.services.scheduler.executor_client import ExecutorClient, claim_executor, free_executors
from pagewire.services.scheduler.metrics import RequestMetrics, request_samples
from pagewire.services.scheduler.policy.block_pool import IntegrityError
from pagewire.services.scheduler.policy.term_limits import limits_of
from pagewire.services.scheduler.prefix_advertiser import advertise_prefixes
from pagewire.services.scheduler.request_manager import RequestManager
from pagewire.services.scheduler.service_meter import ServiceMeter
from pagewire.services.scheduler.spans import note_term_end
from pagewire.services.scheduler.term import Term
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.errors import BusError, BusUnavailable, WireVersionError
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.heartbeat import UNLOADED, Heartbeat
from pagewire.shared.messages.plan import Claimed, Plan
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.polling import poll

HAND_BACK_AFTER = 3.0
"""Seconds without an executor after which the items go to other schedulers."""
CHECK_EVERY = 5.0
"""Seconds between two integrity checks of an idle scheduler."""

_log = structlog.get_logger()
_abort = Decoder(AbortSequences)


class Scheduler:
    """Owns slots, blocks and tokens of its requests. After a failure all of it is rebuilt from the work queue."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._bus = context.bus
        self._model = served_name(context.settings)
        self._token = subjects.model_token(self._model)
        self._last_executor = ""
        """Executor of the present term, or of the last one; empty before the first."""
        self._unanswered: set[str] = set()
        """Executors that have not answered a claim, and may obey this scheduler."""
        self._last_term: Term | None = None
        """The present term, or the last one; None before the first."""
        self._claiming = False
        self._handed_over = False
        self._peers_changed = asyncio.Event()
        self._peers = Peers(context.bus, context.model)
        self._detokenizers = Detokenizers(self._peers)
        self._meter = ServiceMeter(time.monotonic())
        self._metrics = RequestMetrics()
        self._manager = RequestManager(
            context, self._peers, self._detokenizers, self._meter, self._metrics, self._token, self._send_plans
        )
        self._backlog = BacklogReporter(self._bus, self._token, context.instance, self._manager, self._meter)
        self._violations = 0

    async def run(self) -> None:
        """Serves until cancelled; then hands its items back."""
        self._bus.on_reconnect(self._note_reconnection)
        await self._bus.subscribe(f"{subjects.ABORT}.{self._context.instance}.abort", self._on_abort)
        await self._detokenizers.listen()
        await self._peers.listen("detokenizer", self._send_plans)  # the slowest reader may be another one now
        await self._peers.listen("scheduler", self._peers_changed.set)
        await self._peers.listen("executor", self._peers_changed.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._manager.run())
                tasks.create_task(self._backlog.run())
                subject = f"{subjects.PREFIXES}.{self._token}.{self._context.instance}"
                tasks.create_task(advertise_prefixes(self._bus, subject, self._cached_prefixes))
                tasks.create_task(self._check_when_idle())
                while not self._handed_over:
                    await self._serve(*await self._claim())
                await asyncio.Event().wait()
        finally:
            self._manager.end_term()
            self._context.announce()  # not ready: other schedulers take what is addressed to this one at once
            await self._manager.hand_back()

    async def drain(self) -> None:
        """Gives work and executor to another scheduler; without one, finishes what runs.

        A successor is waited for, and until then nothing changes.
        """
        if self._context.follows() is Drain.SUCCESSOR:
            await poll(lambda: self._successor(claiming=True))
        elif not self._successor():
            await self._manager.stop_pulling()
            self._manager.stop_admission()
            await self._manager.return_waiting()
            await poll(lambda: self._manager.idle or self._successor())
        await self._hand_over()

    def _successor(self, *, claiming: bool = False) -> bool:
        """Returns whether another scheduler can go on. With `claiming`, only one that looks for an executor counts."""
        others = [beat for beat in self._peers.alive("scheduler") if beat.instance != self._context.instance]
        return any(beat.load.get("claiming") or (beat.ready and not claiming) for beat in others if not beat.draining)

    async def _hand_over(self) -> None:
        """Ends the term for good, so that the executor is free, and returns all work to its queues."""
        self._handed_over = True
        if (term := self._manager.term) is not None:
            self._manager.end_term()
            term.executor.end_term()
        self._context.announce()
        await self._manager.stop_pulling()
        await self._manager.hand_back()

    async def _claim(self) -> tuple[int, Claimed]:
        """Claims an executor. While there is none for too long, other schedulers get the work."""
        self._claiming = True
        self._context.announce()
        try:
            return await self._search()
        finally:
            self._claiming = False

    async def _search(self) -> tuple[int, Claimed]:
        last, instance = self._last_executor, self._context.instance
        # What an executor has left unfinished need not wait for its successor while another scheduler has an executor.
        due = time.monotonic() + (0.0 if last and self._successor() else HAND_BACK_AFTER)
        while True:
            if self._handed_over:
                await asyncio.Event().wait()
            self._peers_changed.clear()
            claim = None
            try:
                claim = await claim_executor(self._bus, self._peers, instance, self._model, last, self._unanswered)
            except BusError as error:
                _log.warning("executor_not_claimed", reason=str(error))
            if claim is not None:
                term, claimed = claim
                _log.info("executor_claimed", executor=claimed.executor, term=term, blocks=claimed.num_blocks)
                return claim
            if time.monotonic() >= due:
                log = _log.warning if last and not self._unloaded else _log.info  # loading weights takes time
                log("no_executor", retry_in="as soon as one is free")
                await self._manager.hand_back()
                due += HAND_BACK_AFTER
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._peers_changed.wait()

    @property
    def _unloaded(self) -> bool:
        """Whether the supervisor has ended the executors until the next request."""
        return any(beat.load.get(UNLOADED) for beat in self._peers.alive("executor"))

    async def _serve(self, number: int, claimed: Claimed) -> None:
        """Works with one executor until it is lost."""
        if self._handed_over:
            return
        limits = limits_of(claimed, self._context.settings, self._bus.max_payload)
        executor = ExecutorClient(self._bus, self._peers, claimed.executor, number, self._on_step)
        term = Term.begin(executor, limits, self._last_term, claimed.kept_term)
        self._last_executor, self._last_term = executor.name, term
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(executor.run())
            await executor.subscribed.wait()
            self._manager.start_term(term)
            self._context.announce()
            changing = tasks.create_task(self._change_executor(term))
            await reading
            changing.cancel()
        if executor.failed:
            self._manager.on_executor_lost(term)
        note_term_end(self._manager.requests.values(), lost=executor.failed)
        self._manager.end_term()
        self._context.announce()

    async def _change_executor(self, term: Term) -> None:
        """Leaves an executor that is about to end: at once if another one is free, else when nothing runs any more."""
        await term.executor.leaving.wait()
        _log.info("executor_drains", executor=term.executor.name)
        self._manager.stop_admission()
        if self._successor():
            await self._manager.return_waiting()
        await poll(lambda: not term.policy.running or bool(free_executors(self._peers)))
        term.executor.end_term()

    def _note_reconnection(self) -> None:
        if (term := self._manager.term) is not None:
            term.executor.note_seen()

    def _send_plans(self) -> None:
        """Sends the plans that the policy has, and passes on what ended meanwhile."""
        term = self._manager.term
        if term is None or not term.ready:
            return
        if self._manager.end_trial(term):
            term.executor.end_term()
            return
        if term.policy.is_settled:  # as after most steps
            return
        now, slowest_reader = self._bus.store.now(), self._detokenizers.slowest_reader(term.number)
        more = True
        while more:
            decision = term.policy.schedule(now, slowest_reader)
            more = decision.plan is not None and self._send_plan(decision.plan, term)
            self._manager.on_decision(decision, term)

    def _send_plan(self, plan: Plan, term: Term) -> bool:
        """Sends a plan; returns False if the executor is lost because the connection does not take it."""
        try:
            term.executor.send(plan)
        except BusUnavailable as error:
            _log.error("plan_not_sent", reason=str(error))
            term.executor.mark_lost("the connection takes no more")
            return False
        return True

    def _on_step(self, output: StepOutput) -> None:
        term = self._manager.term
        if term is None:
            return
        if output.failed:
            _log.error("step_failed", term=output.term, step=output.step)
            self._manager.on_failed_step(unpack(output.failed), term)
            term.executor.end_term()
            return
        self._manager.on_prefilled(term.policy.on_step(output))
        if any(output.finishes):
            rows = zip(unpack(output.sequences), output.finishes, strict=True)
            self._manager.on_finished((i for i, finish in rows if finish), ended_at=(term.number, output.step))
        self._send_plans()

    def _on_abort(self, message: Message) -> None:
        """Handles a detokenizer's request to end sequences, and answers how many had not ended already."""
        try:
            request = _abort.decode(message.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("abort_unreadable", reason=str(error))
            return
        term, sequences, live = self._manager.term, unpack(request.sequences), 0
        if term is not None and request.term == term.number:
            if request.reason == AbortReason.LOST_TOKENS:
                live = self._manager.attach_again(sequences)
            else:
                live = sum([term.policy.abort(sequence) for sequence in sequences])
                self._manager.on_finished(sequences)
        if message.reply:
            self._bus.publish(message.reply, encode(AbortedSequences(live)))
        self._send_plans()

    def _cached_prefixes(self) -> CachedPrefixes | None:
        """Returns the message to the tokenizers; None while nothing can run here."""
        if (term := self._manager.term) is None:
            return None
        return CachedPrefixes(self._context.instance, term.policy.limits.max_running, term.prefixes.packed())

    async def _check_when_idle(self) -> None:
        """Checks slots and blocks while no request is delayed by it."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            term = self._manager.term
            if term is not None and not term.policy.num_unfinished:
                try:
                    term.policy.sequences.check()
                except IntegrityError as error:
                    self._violations += 1
                    _log.error("integrity_violated", reason=str(error))

    def metrics(self) -> Iterator[Sample]:
        """Yields the figures of requests, blocks and repairs."""
        yield from request_samples(self._manager.requests.values(), self._backlog.queued)
        yield from self._metrics.samples(self._manager.term)
        yield table.VIOLATIONS.sample(self._violations)
        if self._backlog.queued:
            yield table.STORE_LEFT.sample(self._backlog.left)

    def heartbeat(self) -> Heartbeat:
        """Returns the state of this scheduler: it is ready while it has an executor."""
        requests, term = self._manager.requests.values(), self._manager.term
        load: dict[str, float] = {
            "claiming": float(self._claiming and not self._handed_over),
            "requests": len(requests),
            "queued": sum(request.queued for request in requests),
            "start_rate": self._meter.rate(),
            "integrity_violations": self._violations,
            "item_checks": self._manager.restorer.checks,
        }
        instance, problem = self._context.instance, self._manager.consumer.problem
        if term is None:
            load[UNLOADED] = float(self._unloaded)
            return Heartbeat("scheduler", instance, False, term=0, plan=0, step=0, load=load, problem=problem)
        plan, step, load = term.policy.plan_number, max(term.policy.step, 0), load | term.load()
        return Heartbeat("scheduler", instance, term.ready, term.number, plan, step, load, problem=problem)
