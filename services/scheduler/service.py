"""The scheduler: pulls work while it has room, keeps one executor supplied with plans, and reads its steps."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import structlog

from pagewire.services.scheduler.backlog_reporter import BacklogReporter
from pagewire.services.scheduler.executor_client import ExecutorClient, claim_executor, free_executors
from pagewire.services.scheduler.metrics import request_samples
from pagewire.services.scheduler.policy.block_pool import IntegrityError
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.term_limits import limits_of
from pagewire.services.scheduler.prefix_advertiser import advertise_prefixes
from pagewire.services.scheduler.request import Stage
from pagewire.services.scheduler.request_manager import RequestManager
from pagewire.services.scheduler.spans import enter, note_preempted, note_term_end
from pagewire.services.scheduler.step_readers import Readers
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.errors import BusError, BusUnavailable, WireVersionError
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claimed, Plan
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
        self._executor: ExecutorClient | None = None
        self._claiming = False
        self._handed_over = False
        self._peers_changed = asyncio.Event()
        self._peers = Peers(context.bus, on_change=self._on_peers)
        self._readers = Readers(context.bus, self._send_plans)
        self._manager = RequestManager(context, self._peers, self._token, self._send_plans)
        self._backlog = BacklogReporter(self._bus, self._token, context.instance, self._manager)
        self._violations = 0

    async def run(self) -> None:
        """Serves until cancelled; then hands its items back."""
        self._bus.on_reconnect(self._note_reconnection)
        await self._bus.subscribe(f"{subjects.ABORT}.{self._context.instance}.abort", self._on_abort)
        await self._peers.listen("scheduler")
        await self._peers.listen("executor")
        await self._readers.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._manager.run())
                tasks.create_task(self._backlog.run())
                subject = f"{subjects.PREFIXES}.{self._token}.{self._context.instance}"
                tasks.create_task(advertise_prefixes(self._bus, subject, self._manager.cached_prefixes))
                tasks.create_task(self._check_when_idle())
                while not self._handed_over:
                    await self._serve(*await self._claim())
                await asyncio.Event().wait()
        finally:
            self._executor = None
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
        executor, self._executor = self._executor, None
        self._manager.end_term()
        if executor is not None:
            executor.end_term()
        self._context.announce()
        await self._manager.stop_pulling()
        await self._manager.hand_back()

    def _on_peers(self) -> None:
        self._peers_changed.set()
        self._manager.consumer.on_peers()

    async def _claim(self) -> tuple[int, Claimed]:
        """Claims an executor. While there is none for too long, other schedulers get the work."""
        self._claiming = True
        self._context.announce()
        try:
            return await self._search()
        finally:
            self._claiming = False

    async def _search(self) -> tuple[int, Claimed]:
        last = "" if self._executor is None else self._executor.name
        # What an executor has left unfinished need not wait for its successor while another scheduler has an executor.
        due = time.monotonic() + (0.0 if last and self._successor() else HAND_BACK_AFTER)
        while True:
            if self._handed_over:
                await asyncio.Event().wait()
            self._peers_changed.clear()
            found = None
            try:
                found = await claim_executor(self._bus, self._peers, self._context.instance, self._model, last)
            except BusError as error:
                _log.warning("executor_not_claimed", reason=str(error))
            if found is not None:
                _log.info("executor_claimed", executor=found[1].executor, term=found[0], blocks=found[1].num_blocks)
                return found
            if time.monotonic() >= due:
                log = _log.warning if last else _log.info  # at the start, loading weights takes time
                log("no_executor", retry_in="as soon as one is free")
                await self._manager.hand_back()
                due += HAND_BACK_AFTER
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._peers_changed.wait()

    async def _serve(self, term: int, claimed: Claimed) -> None:
        """Works with one executor until it is lost."""
        if self._handed_over:
            return
        limits = limits_of(claimed, self._context.settings, self._bus.max_payload)
        executor = self._executor = ExecutorClient(self._bus, claimed.executor, term, self._on_step)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(executor.run())
            await executor.subscribed.wait()
            self._manager.start_term(Policy(term, limits), claimed.executor)
            self._context.announce()
            changing = tasks.create_task(self._change_executor(executor))
            await reading
            changing.cancel()
        self._manager.meter.metrics.gaps += executor.gaps
        self._manager.meter.metrics.repairs += executor.repairs
        executor.gaps = executor.repairs = 0
        if executor.failed:
            self._manager.meter.metrics.executors_lost += 1
            self._manager.on_executor_lost()
        note_term_end(self._manager.requests.values(), lost=executor.failed)
        self._manager.end_term()
        self._context.announce()

    async def _change_executor(self, executor: ExecutorClient) -> None:
        """Leaves an executor that is about to end: at once if another one is free, else when nothing runs any more."""
        await executor.leaving.wait()
        policy = self._manager.policy
        _log.info("executor_drains", executor=executor.name)
        self._manager.stop_admission()
        if self._successor():
            await self._manager.return_waiting()
        await poll(lambda: policy is None or not policy.running or bool(free_executors(self._peers)))
        executor.end_term()

    def _note_reconnection(self) -> None:
        if self._executor is not None:
            self._executor.note_reconnection()

    def _send_plans(self) -> None:
        """Sends the plans that the policy has, and passes on what ended meanwhile."""
        policy, executor = self._manager.policy, self._executor
        if policy is None or executor is None or executor.lost.is_set():
            return
        if self._manager.end_trial():
            executor.end_term()
            return
        policy.slowest_reader = self._readers.slowest(policy.term)
        policy.now = time.time()
        try:
            while (plan := policy.schedule()) is not None:
                self._note_slots(policy, plan, executor.name)
                executor.send(plan)
                if plan.added:
                    self._manager.consumer.notify()
        except BusUnavailable as error:
            _log.error("plan_not_sent", reason=str(error))
            executor.mark_lost("the connection takes no more")
        if policy.preempted:
            preempted, policy.preempted = policy.preempted, []
            note_preempted(self._manager.by_sequence, preempted)
        if policy.expired:
            expired, policy.expired = policy.expired, []
            self._manager.on_finished(expired)  # the detokenizer tells their clients
        if policy.beam_search.finished:
            finished, policy.beam_search.finished = policy.beam_search.finished, []
            self._manager.on_beams_finished(finished)

    def _on_step(self, output: StepOutput) -> None:
        policy = self._manager.policy
        if policy is None or output.term != policy.term:
            return
        if output.failed:
            self._fail_step(output)
            return
        policy.on_step(output)
        for sequence in policy.prefilled:
            request = self._manager.by_sequence.get(sequence.caller_ids[0])
            if request is not None:
                self._manager.meter.metrics.on_first_token(request)
        if any(output.finishes):
            rows = zip(unpack(output.sequences), output.finishes, strict=True)
            self._manager.on_finished((sequence for sequence, finish in rows if finish), unread=True)
        self._send_plans()

    def _fail_step(self, output: StepOutput) -> None:
        """Ends the term with a step that has raised."""
        _log.error("step_failed", term=output.term, step=output.step)
        self._manager.on_failed_step(unpack(output.failed))
        if self._executor is not None:
            self._executor.end_term()

    def _on_abort(self, message: Message) -> None:
        """Handles a detokenizer's request to end sequences, and answers how many had not ended already."""
        try:
            request = _abort.decode(message.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("abort_unreadable", reason=str(error))
            return
        policy = self._manager.policy
        sequences = unpack(request.sequences)
        aborted = 0
        if policy is not None and request.term == policy.term and request.reason == AbortReason.LOST_TOKENS:
            aborted = self._manager.attach_again(sequences)
        elif policy is not None and request.term == policy.term:
            aborted = sum([policy.abort(sequence) for sequence in sequences])
            self._manager.on_finished(sequences)
        if message.reply:
            self._bus.publish(message.reply, encode(AbortedSequences(aborted)))
        self._send_plans()

    def _note_slots(self, policy: Policy, plan: Plan, executor: str) -> None:
        """Notes which requests run from this plan on."""
        for added in plan.added:
            sequence = policy.sequences.by_id[added.sequence]
            request = self._manager.by_sequence.get(sequence.caller_ids[0])
            if request is None:
                continue
            if request.queued:
                request.queued = False
                self._manager.meter.start(request, time.monotonic())
            if request.stage is not Stage.RUN:
                enter(request, Stage.RUN, cached_tokens=added.computed, executor=executor)

    async def _check_when_idle(self) -> None:
        """Checks slots and blocks while no request is delayed by it."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            policy = self._manager.policy
            if policy is not None and not policy.num_unfinished:
                try:
                    policy.sequences.check()
                except IntegrityError as error:
                    self._violations += 1
                    _log.error("integrity_violated", reason=str(error))

    def metrics(self) -> Iterator[Sample]:
        """Yields the figures of requests, blocks and repairs."""
        manager, counted, executor = self._manager, self._manager.meter.metrics, self._executor
        yield from request_samples(manager.requests.values(), self._backlog.queued)
        yield from counted.samples(manager.policy)
        if executor is not None and not executor.lost.is_set():
            yield table.PAIR.sample(1.0, executor.name)
        yield table.GAPS.sample(counted.gaps + (executor.gaps if executor is not None else 0))
        yield table.REPAIRS.sample(counted.repairs + (executor.repairs if executor is not None else 0))
        yield table.VIOLATIONS.sample(self._violations)
        if self._backlog.queued:
            yield table.STORE_LEFT.sample(self._backlog.left)

    def heartbeat(self) -> Heartbeat:
        """Returns the state of this scheduler: it is ready while it has an executor."""
        policy, executor = self._manager.policy, self._executor
        load: dict[str, float] = {
            "claiming": float(self._claiming and not self._handed_over),
            "requests": len(self._manager.requests),
            "queued": sum(request.queued for request in self._manager.requests.values()),
            "start_rate": self._manager.meter.rate(),
            "integrity_violations": self._violations,
        }
        if policy is not None:
            load |= {
                "running": len(policy.running),
                "waiting": len(policy.waiting),
                "blocks_held": policy.pool.num_used,
                "blocks": policy.pool.num_blocks,
                "preemptions": policy.preemptions,
                "budget": policy.step_tokens,
            }
        ready = executor is not None and not executor.lost.is_set()
        term, plan, step = (policy.term, policy.plan_number, policy.step) if policy else (0, 0, -1)
        return Heartbeat("scheduler", self._context.instance, ready, term, plan, max(step, 0), load)
