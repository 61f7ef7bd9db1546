"""The scheduler: pulls work while it has room, keeps one executor supplied with plans, and reads what it did."""

import asyncio
import time
from contextlib import suppress

import msgspec
import structlog
from opentelemetry.util.types import AttributeValue

from pagewire.services.scheduler import bulletin
from pagewire.services.scheduler.blocks import IntegrityError
from pagewire.services.scheduler.intake import Intake
from pagewire.services.scheduler.limits import Limits
from pagewire.services.scheduler.link import Link, claim
from pagewire.services.scheduler.policy import Policy
from pagewire.services.scheduler.readers import Readers
from pagewire.shared import subjects, telemetry
from pagewire.shared.bus import Message
from pagewire.shared.config import STEP_TOKENS
from pagewire.shared.context import Context
from pagewire.shared.errors import BusUnavailable, WireVersionError
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortSequences
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claimed, Plan
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.model_folder import served_name
from pagewire.shared.peers import Peers

HAND_BACK_AFTER = 3.0
"""Seconds without an executor after which the items go to other schedulers."""
PLAN_SHARE = 0.5
"""Part of the broker's payload limit that the added slots of one plan may fill."""
CHECK_EVERY = 5.0
"""Seconds between two integrity checks of an idle scheduler."""

_log = structlog.get_logger()
_abort = Decoder(AbortSequences)


class Scheduler:
    """Owns slots, blocks and tokens of the requests that it holds. All of it is rebuilt from the work queue."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._bus = context.bus
        self._model = served_name(context.settings)
        self._token = subjects.model_token(self._model)
        self._executors = asyncio.Event()
        self._peers = Peers(context.bus, on_heartbeat=self._executors.set)
        self._intake = Intake(context, self._peers, self._token, self._pump)
        self._link: Link | None = None
        self._readers = Readers(context.bus, self._pump)
        self._violations = 0

    async def run(self) -> None:
        """Serves until cancelled; then hands its items back."""
        await self._bus.subscribe(f"{subjects.ABORT}.{self._context.instance}.abort", self._on_abort)
        await self._peers.listen("scheduler")
        await self._peers.listen("executor")
        await self._readers.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._intake.run())
                tasks.create_task(self._check_when_idle())
                told = f"{subjects.PREFIXES}.{self._token}.{self._context.instance}"
                tasks.create_task(bulletin.publish(self._bus, told, self._intake.cached))
                while True:
                    await self._serve(*await self._claim())
        finally:
            self._link = None
            self._context.announce()  # not ready: what is addressed to this replica is for the others at once
            await self._intake.hand_back()

    def heartbeat(self) -> Heartbeat:
        """Ready while an executor obeys."""
        policy, link = self._intake.policy, self._link
        requests = self._intake.requests
        load: dict[str, float] = {
            "requests": len(requests),
            "queued": sum(request.queued for request in requests.values()),
            "drain_rate": self._intake.drain.at(time.monotonic()),
            "integrity_violations": self._violations,
        }
        if policy is not None:
            load |= {
                "running": len(policy.running),
                "waiting": len(policy.waiting) + len(policy.searches.stalled),
                "blocks_held": policy.pool.held,
                "blocks": policy.pool.num_blocks,
                "preemptions": policy.preemptions,
                "budget": policy.step_tokens,
            }
        ready = link is not None and not link.lost.is_set()
        term, plan, step = (policy.term, policy.plan_number, policy.step) if policy else (0, 0, -1)
        return Heartbeat("scheduler", self._context.instance, ready, term, plan, max(step, 0), load)

    async def _claim(self) -> tuple[int, Claimed]:
        """An executor of this scheduler's own. While there is none for too long, others get the work."""
        last = "" if self._link is None else self._link.executor
        due = time.monotonic() + HAND_BACK_AFTER
        while True:
            self._executors.clear()
            found = await claim(self._bus, self._peers, self._context.instance, self._model, last)
            if found is not None:
                _log.info("executor_claimed", executor=found[1].executor, term=found[0], blocks=found[1].num_blocks)
                return found
            if time.monotonic() >= due:
                log = _log.warning if last else _log.info  # at the start weights take their time
                log("no_executor", retry_in="as soon as one is free")
                await self._intake.hand_back()
                due += HAND_BACK_AFTER
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._executors.wait()

    async def _serve(self, term: int, claimed: Claimed) -> None:
        """Works with one executor until it is lost."""
        settings = self._context.settings
        limits = Limits(
            num_blocks=claimed.num_blocks,
            block_size=claimed.block_size,
            max_num_seqs=claimed.max_num_seqs,
            budget=settings.max_num_batched_tokens or STEP_TOKENS,
            window=settings.lease_window,
            prefix_cache=settings.prefix_cache,
            itl_target_ms=settings.itl_target_ms,
            max_plan_bytes=int(self._bus.max_payload * PLAN_SHARE),
            max_budget=0 if settings.max_num_batched_tokens else claimed.max_step_tokens,
            max_candidates=claimed.max_candidates,
        )
        link = self._link = Link(self._bus, claimed.executor, term, self._on_step)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(link.run())
            await link.listening.wait()
            self._intake.begin(Policy(term, limits), claimed.executor)
            self._context.announce()
            await reading
        self._intake.pause()
        self._context.announce()

    async def _check_when_idle(self) -> None:
        """Compares the books with each other while that disturbs nobody."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            policy = self._intake.policy
            if policy is None or policy.live:
                continue
            try:
                policy.check()
            except IntegrityError as error:
                self._violations += 1
                _log.error("integrity_violated", reason=str(error))

    def _pump(self) -> None:
        """Sends what the policy has to say."""
        policy, link = self._intake.policy, self._link
        if policy is None or link is None or link.lost.is_set():
            return
        policy.slowest_reader = self._readers.slowest(policy.term)
        policy.now = time.time()
        try:
            while (plan := policy.schedule()) is not None:
                self._trace_queue(policy, plan)
                link.send(plan)
                if plan.added:
                    self._intake.begun()
        except BusUnavailable as error:
            _log.error("plan_not_sent", reason=str(error))
            link.lose("the connection takes no more")
        if policy.expired:
            expired, policy.expired = policy.expired, []
            self._intake.ended(expired)  # the detokenizer tells their clients
        if policy.searches.found:
            found, policy.searches.found = policy.searches.found, []
            self._intake.conclude(found)

    def _trace_queue(self, policy: Policy, plan: Plan) -> None:
        """The span between the queue's acknowledgement and the first slot of a request."""
        for added in plan.added:
            request = self._intake.by_sequence.get(policy.asked(added.sequence))
            if request is not None and request.queued:
                request.queued = False
                attributes: dict[str, AttributeValue] = {
                    "request_id": request.work.request_id,
                    "cached_tokens": added.computed,
                }
                telemetry.span("queue", request.trace, request.stored_at, time.time(), attributes)

    def _on_step(self, output: StepOutput) -> None:
        policy = self._intake.policy
        if policy is None or output.term != policy.term:
            return
        policy.on_step(output)
        if any(output.finishes):
            rows = zip(unpack(output.sequences), output.finishes, strict=True)
            self._intake.ended(sequence for sequence, finish in rows if finish)
        self._pump()

    def _on_abort(self, message: Message) -> None:
        try:
            wanted = _abort.decode(message.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("abort_unreadable", reason=str(error))
            return
        policy = self._intake.policy
        sequences = unpack(wanted.sequences)
        known = 0
        if policy is not None and wanted.term == policy.term:
            known = sum([policy.drop(sequence) for sequence in sequences])
            self._intake.ended(sequences)
        if message.reply:
            self._bus.publish(message.reply, encode(AbortedSequences(known)))
        self._pump()
