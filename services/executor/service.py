"""The executor: belongs to one scheduler at a time, runs its plans, and publishes the output of each step."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import structlog

from pagewire.services.executor.adapters.registrar import Registrar
from pagewire.services.executor.adapters.requests import AdapterRequests
from pagewire.services.executor.adapters.targets import Targets
from pagewire.services.executor.devices.capacity import has_room_beside
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.outputs.replay_buffer import ReplayBuffer
from pagewire.services.executor.outputs.replay_responder import ReplayResponder
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.ownership import Ownership
from pagewire.services.executor.spans import Spans
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.services.executor.steps.step_thread import DeviceThread
from pagewire.shared import subjects
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.bus import Message
from pagewire.shared.errors import BusError, ConfigurationError
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.heartbeat import MEMORY, RESERVED, Heartbeat
from pagewire.shared.messages.plan import Claim, Claimed, Plan, Replay
from pagewire.shared.messages.recent_steps import RecentSteps
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.models import model_folder
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.linux_process import family_bytes, predecessors, wait_for
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.polling import poll
from pagewire.shared.settings.config import store_replicas

_claims = Decoder(Claim)
_plans = Decoder(Plan)
_replays = Decoder(Replay)
_log = structlog.get_logger()


class Executor:
    """Serves one device over the bus.

    A plan that contradicts the slot table ends the term: the slots are freed, no plan is answered, and the heartbeat
    reports not ready, until a scheduler claims the executor with a higher term.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._bus = context.bus
        self._steps_subject = f"{subjects.STEPS}.{context.instance}"
        self._peers = Peers(context.bus, context.model)
        self._owner = Ownership(model_folder.served_name(context.settings), self._peers.find, self._peers.gone)
        self._inbox = PlanInbox()
        self._replay_buffer = ReplayBuffer()
        self._replay_responder = ReplayResponder(context.bus, self._replay_buffer)
        self._spans = Spans()
        self._adapters = AdapterStore(context.bus, context.model)
        self._steps: StepLoop | None = None
        self._ready = False
        self._waiting = False
        """Whether a predecessor still has the device."""
        self._leaving = False
        """Whether the scheduler shall leave this executor."""
        self._announced_free = False
        """Whether the last heartbeat said that the executor is free."""
        self._last_step = -1
        self._kept_term = 0
        """Term of the last plan received; 0 if that was refused."""
        self._reserved = 0
        """Bytes that this process and its ranks hold when the KV pool is full."""

    def heartbeat(self) -> Heartbeat:
        """Returns the heartbeat: `plan` is the last plan received without a gap, `step` the last step published."""
        steps = self._steps
        load: dict[str, float] = {"waiting": float(self._waiting), "leaving": float(self._leaving)}
        if steps is not None:
            self._announced_free = self._free
            load |= {"free": float(self._announced_free), RESERVED: float(self._reserved), **asdict(steps.counters)}
            if self._context.settings.tensor_parallel_size > 1:
                load[MEMORY] = float(family_bytes(os.getpid()))
        return Heartbeat(
            service="executor",
            instance=self._context.instance,
            ready=self._ready and steps is not None and not steps.overdue and not steps.broken,
            term=self._owner.term,
            plan=self._inbox.last,
            step=self._last_step,
            load=load,
        )

    def metrics(self) -> Iterable[Sample]:
        """Returns the figures of the steps."""
        return () if self._steps is None else self._steps.samples()

    async def drain(self) -> None:
        """Waits until the scheduler has left this executor, after a successor, if one comes, has started."""
        settings = self._context.settings
        if self._context.follows() is Drain.SUCCESSOR:
            with suppress(TimeoutError):
                async with asyncio.timeout(settings.drain_timeout / 2):
                    await poll(self._has_successor)
        self._leaving = True
        self._context.announce()
        await poll(lambda: not self._ready or self._owner.released)

    async def run(self) -> None:
        """Opens the device and serves until cancelled.

        Raises:
            ConfigurationError: the model or the device cannot be opened as configured.
            ExceptionGroup: a step has raised, and the device does not recover from it.
        """
        await self._peers.listen("executor", self._on_heartbeat)
        before = predecessors()
        if not has_room_beside(self._context.settings.device, sum(map(family_bytes, before))):
            self._waiting = True
            await wait_for(before)
            self._waiting = False
        fetch = partial(self._fetch_adapter, asyncio.get_running_loop())
        device = await DeviceThread.open(self._context.settings, self._inbox, self._deliver, fetch)
        self._reserved = family_bytes(os.getpid()) + device.capacity.pool_bytes
        self._steps = device.steps
        try:
            await self._serve(device)
        finally:
            self._ready = False
            await device.close()

    async def _serve(self, device: DeviceThread) -> None:
        instance = self._context.instance
        # First, as schedulers claim an executor as soon as it can be asked.
        targets = device.adapter_targets
        registrar = await self._open_adapters(targets) if targets is not None else None
        adapters = None if registrar is None else AdapterRequests(self._bus, self._context.model, registrar)
        await self._peers.listen("scheduler", self._on_heartbeat, self._on_scheduler_ended)
        subscriptions = [
            await self._bus.subscribe(f"{subjects.PLAN}.{instance}", self._on_plan),
            await self._bus.subscribe(f"{subjects.REPLAY}.{instance}", self._on_replay),
            await self._bus.subscribe(f"{subjects.CLAIM}.{instance}", partial(self._on_claim, device.capacity)),
            await self._bus.subscribe(subjects.RECENT_STEPS, self._on_recent_steps),
        ]
        if adapters is not None:
            subscriptions += await adapters.subscribe()
        self._ready = True
        self._context.announce()
        _log.info("device_open", device=self._context.settings.device, **asdict(device.capacity))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._replay_responder.run())
                if registrar is not None and adapters is not None:
                    tasks.create_task(registrar.run())
                    tasks.create_task(adapters.run())
                await device.failure()
        finally:
            for subscription in subscriptions:
                await subscription.unsubscribe()

    async def _open_adapters(self, targets: Targets) -> Registrar:
        """Gives the adapters of the settings their names; returns what changes them from then on."""
        settings = self._context.settings
        await self._adapters.prepare(settings.adapter_store, store_replicas(settings))
        registrar = Registrar(self._adapters, settings, targets)
        await registrar.configure()
        return registrar

    def _fetch_adapter(self, loop: asyncio.AbstractEventLoop, digest: str) -> AdapterFiles:
        """Returns the files of an adapter. Called on another thread than that of the event loop."""
        reading = asyncio.run_coroutine_threadsafe(self._adapters.get(digest), loop)
        try:
            return reading.result()  # the store has a deadline for each part
        except BusError as error:
            raise ConfigurationError("the broker does not answer") from error

    def _on_claim(self, capacity: Capacity, message: Message) -> None:
        claim = _claims.read(message)
        if claim is None or not message.reply:
            return
        assert self._steps is not None
        accepted = not self._leaving and not self._steps.broken and self._owner.decide(claim)
        if accepted and self._inbox.term != claim.term:
            self._inbox.begin(claim.term)
            self._ready, self._last_step = True, -1
            self._context.announce()
            _log.info("claimed", scheduler=claim.scheduler, term=claim.term)
        answer = Claimed(
            executor=self._context.instance,
            accepted=accepted,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            windows=pack(capacity.windows),
            max_num_seqs=capacity.max_num_seqs,
            max_model_len=capacity.max_model_len,
            max_candidates=capacity.max_candidates,
            max_step_tokens=capacity.max_step_tokens,
            step_tokens=capacity.step_tokens,
            mixed_prompt_tokens=capacity.mixed_prompt_tokens,
            kept_term=self._kept_term,
        )
        self._publish(message.reply, encode(answer))

    def _on_plan(self, message: Message) -> None:
        plan = _plans.read(message)
        if plan is not None and plan.term == self._owner.term:
            self._owner.renew()
            self._kept_term = plan.term
            self._inbox.put(plan)

    @property
    def _free(self) -> bool:
        return self._owner.free and not self._leaving

    def _has_successor(self) -> bool:
        """Returns whether another executor is free, or will be as soon as this one has ended."""
        others = [beat for beat in self._peers.alive("executor") if beat.instance != self._context.instance]
        return any(beat.load.get("waiting") or beat.load.get("free") for beat in others if not beat.draining)

    def _on_heartbeat(self) -> None:
        """Announces at once when a scheduler has given the executor up."""
        self._owner.observe()
        if self._steps is not None and self._free and not self._announced_free:
            self._context.announce()

    def _on_scheduler_ended(self, _: str, scheduler: str) -> None:
        if self._owner.forget(scheduler):
            self._context.announce()

    def _on_replay(self, message: Message) -> None:
        request = _replays.read(message)
        if request is not None and message.reply:
            self._replay_responder.ask(request, message.reply)

    def _on_recent_steps(self, message: Message) -> None:
        """Answers the gateway, whose console shows the latest steps."""
        if self._steps is not None and subjects.is_client_inbox(message.reply):
            recent = RecentSteps(self._context.instance, tuple(self._steps.metrics.recent))
            self._publish(message.reply, encode(recent))

    def _deliver(self, result: StepResult | PlanRefused) -> None:
        """Publishes a result of the step thread, unless another term has begun."""
        if isinstance(result, StepResult):
            output = result.output
            if output.term == self._owner.term:
                data = encode(output)
                self._replay_buffer.append(output.term, output.step, data)
                self._publish(self._steps_subject, data)
                self._last_step = output.step
            self._spans.observe(result)
        elif result.term == self._owner.term:
            _log.error("plan_refused", term=result.term, reason=result.reason)
            self._owner.release()
            self._ready, self._kept_term = False, 0
            self._context.announce()

    def _publish(self, subject: str, data: bytes) -> None:
        try:
            self._bus.publish(subject, data)
        except BusError as error:  # readers see the gap and ask for a replay; schedulers repeat claims
            _log.warning("not_published", subject=subject, reason=str(error))
