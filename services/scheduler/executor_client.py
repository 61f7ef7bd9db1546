"""The executor as its scheduler sees it during one term: sends plans, reads steps, and repairs lost messages."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.errors import BusError, NoResponders, RequestTimeout, WireVersionError
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.plan import Claim, Claimed, Plan, Replay
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.process.peers import SILENCE, Peers
from pagewire.shared.rendezvous import rank
from pagewire.shared.step_reader import StepReader

CLAIM_TIMEOUT = 5.0
"""Seconds that an executor has to answer a claim: more than a frozen one takes to count as gone, so that one without a
core is not claimed again and again under higher terms."""
MAX_SENT_PLANS = 4096
"""Latest plans that can be sent again."""
ABSENCE = 1.0
"""Seconds that an executor may be absent from the broker: in a cluster it moves to another server when its own dies."""
RESEND_AFTER = 0.25
"""Seconds after which a plan that the executor has not applied counts as lost."""

_log = structlog.get_logger()
_claimed = Decoder(Claimed)
_step = Decoder(StepOutput)


def free_executors(peers: Peers) -> list[str]:
    """Returns the executors that belong to no scheduler and do not drain."""
    return [beat.instance for beat in peers.alive("executor") if beat.load.get("free") and not beat.draining]


async def claim_executor(
    bus: Bus, peers: Peers, owner: str, model: str, last: str, unanswered: set[str]
) -> tuple[int, Claimed] | None:
    """Claims a free executor, or one of its own again; returns the new term and its answer, None when there is none.

    There is none either while the store gives no term. Schedulers that search at the same time ask different executors
    first. Its own are the `last` one and the `unanswered` ones, which have not answered a claim: such an executor may
    obey `owner` all the same, and is free for nobody then. This function adds and removes them.

    Raises:
        BusUnavailable: the connection is lost; `unanswered` has the executor that was asked.
    """
    beats = [peers.find(name) for name in {last, *unanswered}]
    own = [beat.instance for beat in beats if beat is not None and not beat.draining]
    for executor in rank(owner, {*free_executors(peers), *own}):
        try:
            term = await bus.store.next_term()
        except BusError as error:
            _log.warning("no_term", reason=str(error))
            return None
        request = encode(Claim(scheduler=owner, term=term, model=model))
        unanswered.add(executor)
        try:
            answer = await bus.request(f"{subjects.CLAIM}.{executor}", request, timeout=CLAIM_TIMEOUT)
        except (NoResponders, RequestTimeout):
            continue
        unanswered.discard(executor)
        claimed = _claimed.decode(answer.data)
        if claimed.accepted:
            return term, claimed
    return None


class ExecutorClient:
    """One executor, claimed under one term.

    Attributes:
        subscribed: set once no step can be missed.
        leaving: set once the executor says that it is about to end, and that the scheduler shall leave it.
        lost: set once the term has ended, or the executor cannot be reached or obeys another scheduler.
        failed: whether the executor is lost, and a request that it ran may be the cause.
        gaps: number of times that steps were missing.
        repairs: number of these gaps that a replay has closed.
    """

    def __init__(self, bus: Bus, peers: Peers, name: str, term: int, on_step: Callable[[StepOutput], None]) -> None:
        self.name = name
        self.term = term
        self.failed = False
        self.gaps = 0
        self.repairs = 0
        self.leaving = asyncio.Event()
        self.lost = asyncio.Event()
        self.subscribed = asyncio.Event()
        self._bus = bus
        self._peers = peers
        self._on_step = on_step
        self._reader = StepReader(term)
        self._sent: deque[tuple[int, float, bytes]] = deque(maxlen=MAX_SENT_PLANS)
        self._inbox = bus.new_inbox()
        self._last_seen = time.monotonic()
        self._absent_since: float | None = None
        self._heartbeat, self._heard_at = peers.last(name)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Reads steps until the executor is lost."""
        subscriptions: list[Subscription] = []
        try:
            subscriptions.append(await self._bus.subscribe(f"{subjects.STEPS}.{self.name}", self._on_output))
            subscriptions.append(await self._bus.subscribe(self._inbox, self._on_refusal))
            subscriptions.append(await self._peers.listen("executor", self._on_heartbeat, self._on_ended))
            self.note_seen()  # silence counts from here on
            self.subscribed.set()
            await self._watch()
        finally:
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def send(self, plan: Plan) -> None:
        """Publishes a plan. The broker answers at once when the executor is gone."""
        data = encode(plan)
        self._sent.append((plan.number, time.monotonic(), data))
        self._bus.publish(f"{subjects.PLAN}.{self.name}", data, reply=self._inbox)

    def mark_lost(self, reason: str, *, failed: bool = False) -> None:
        """Gives the executor up; `failed`: a request may be the cause, unless the executor was leaving."""
        if not self.lost.is_set():
            self.failed = failed and not self.leaving.is_set()
            _log.warning("executor_lost", executor=self.name, term=self.term, reason=reason)
        self.end_term()

    def end_term(self) -> None:
        """Ends the term. The next one begins with a claim."""
        self.lost.set()
        self._wake.set()

    async def _watch(self) -> None:
        """Repairs what heartbeats and gaps show to be missing; returns when the executor is lost."""
        while not self.lost.is_set():
            try:
                async with asyncio.timeout(self._lost_at() - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                await self._judge_silence()
                continue
            self._wake.clear()
            self._resend_plans()
            await self._fetch_missing()

    async def _judge_silence(self) -> None:
        """Gives the executor up if the broker has no message from it either.

        Messages may wait here unread, since this process had no core, or in a broker that does not answer: then silence
        counts anew.
        """
        try:
            await self._bus.flush(timeout=SILENCE)  # what the broker sent before has been read by then
        except BusError:
            self.note_seen()
        if time.monotonic() >= self._lost_at():
            reason = f"silent for {SILENCE} s" if self._absent_since is None else "nobody takes its plans"
            self.mark_lost(reason, failed=True)

    def _lost_at(self) -> float:
        """Returns when the executor counts as lost if it says nothing more."""
        silent = self._last_seen + SILENCE
        return silent if self._absent_since is None else min(silent, self._absent_since + ABSENCE)

    def _resend_plans(self) -> None:
        beat, now = self._heartbeat, time.monotonic()
        if beat is None or beat.term != self.term:
            return
        for number, sent, data in self._sent:
            if number > beat.plan and now - sent > RESEND_AFTER:
                self._bus.publish(f"{subjects.PLAN}.{self.name}", data, reply=self._inbox)

    async def _fetch_missing(self) -> None:
        if (missing := self._reader.missing) is None:
            return
        self.gaps += 1
        request = encode(Replay(term=self.term, first=missing[0], last=missing[1]))
        try:
            async for message in self._bus.request_many(f"{subjects.REPLAY}.{self.name}", request, stall=SILENCE):
                self._on_output(message)
        except BusError as error:
            _log.warning("replay_failed", executor=self.name, first=missing[0], last=missing[1], reason=str(error))
            return  # the next heartbeat asks again
        if self._reader.missing is not None and self._reader.missing[0] == missing[0]:
            self.mark_lost(f"step {missing[0]} is gone from its ring")
        else:
            self.repairs += 1

    def note_seen(self) -> None:
        """Has silence count anew: the executor was heard, or its messages may have been missed until now."""
        self._last_seen = time.monotonic()
        self._absent_since = None

    def _on_output(self, message: Message) -> None:
        try:
            output = _step.decode(message.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("step_unreadable", executor=self.name, reason=str(error))
            return
        self.note_seen()
        if output.term != self.term:
            return
        for step in self._reader.feed(output):
            self._on_step(step)
        if self._reader.missing is not None:
            self._wake.set()

    def _on_ended(self, _: str, instance: str) -> None:
        if instance == self.name:
            self.mark_lost("its process has ended", failed=True)

    def _on_heartbeat(self) -> None:
        beat, heard_at = self._peers.last(self.name)
        if beat is None or heard_at == self._heard_at:
            return  # the heartbeat of another executor
        self._heard_at = heard_at
        self.note_seen()
        if beat is self._heartbeat:
            return  # it was repeated while the executor waits for a core
        self._heartbeat = beat
        if beat.load.get("leaving"):
            self.leaving.set()
        if beat.term > self.term:
            self.mark_lost(f"it obeys term {beat.term}")
        elif beat.term == self.term:
            self._reader.note_run(beat.term, beat.step)
            if not beat.ready and not beat.draining:
                self.mark_lost("it cannot go on", failed=True)
        self._wake.set()

    def _on_refusal(self, _: Message) -> None:
        """Handles the broker's no-responders status: no subscriber has received a plan.

        An executor that is not back soon is lost. Until then it gets the plan again after its next heartbeat.
        """
        if self._absent_since is None:
            self._absent_since = time.monotonic()
            self._wake.set()
