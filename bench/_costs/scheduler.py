"""The scheduler: steps of decode rows in, plans out."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from pagewire.bench._costs.rig import ROWS, Rig, serving
from pagewire.bench._costs.tap import Tap, Wrap
from pagewire.services.scheduler.service import Scheduler
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.attach import Attached, AttachState
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Claim, Claimed, Plan
from pagewire.shared.messages.step import Finish, StepOutput
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.process.context import Context
from pagewire.shared.sampling_parameters import pack_record
from pagewire.shared.settings.config import Settings

_MODEL = "tiny"
_STEPS = 8
"""Steps in a turn."""
_BEAT_EVERY = 0.1
_STEPS_SUBJECT = f"{subjects.STEPS}.exec"
_plan = Decoder(Plan)
_claim = Decoder(Claim)


class _Executor(Rig):
    """An executor that computes whole prompts in one step, and then one token of every sequence per step."""

    per_message = float(ROWS)

    def __init__(self, tap: Tap, bus: MemoryBus) -> None:
        self._tap = tap
        self._bus = bus
        self._lengths: dict[int, int] = {}  # known tokens of each sequence that decodes
        self._term = self._plan = self._step = 0
        self._messages: list[Message] = []

    def on_claim(self, message: Message) -> None:
        """Accepts every claim."""
        self._term = _claim.decode(message.data).term
        answer = Claimed("exec", True, num_blocks=1 << 15, block_size=16, max_num_seqs=ROWS, max_model_len=2048)
        self._bus.publish(message.reply, encode(answer))

    async def beat(self) -> None:
        """Sends heartbeats until cancelled."""
        while True:
            beat = Heartbeat("executor", "exec", True, self._term, self._plan, self._step - 1, {"free": 1.0})
            self._bus.publish(f"{subjects.HEARTBEAT}.executor.exec", encode(beat))
            await asyncio.sleep(_BEAT_EVERY)

    async def start(self) -> None:
        """Computes prompts as they come, until every sequence decodes."""
        while len(self._lengths) < ROWS:
            await self._tap.progress.until(lambda: bool(self._tap.sent))
            plans = [_plan.decode(data) for data in self._take()]
            prompts = {added.sequence: len(unpack(added.tokens)) for plan in plans for added in plan.added}
            self._tap.feed(_STEPS_SUBJECT, self._output(list(prompts), [0] * len(prompts), list(prompts.values())))
            self._lengths |= {sequence: length + 1 for sequence, length in prompts.items()}

    @override
    def prepare(self) -> None:
        self._take()
        self._messages = [self._decode() for _ in range(_STEPS)]

    @override
    async def turn(self) -> float:
        for message in self._messages:
            self._tap.feed(_STEPS_SUBJECT, message)
        assert self._tap.sent, "the scheduler has sent no plan"
        return ROWS * _STEPS

    def _take(self) -> list[bytes]:
        plans = list(self._tap.sent)
        self._tap.sent.clear()
        if plans:
            self._plan = _plan.decode(plans[-1]).number
        return plans

    def _decode(self) -> Message:
        starts = [length - 1 for length in self._lengths.values()]
        for sequence in self._lengths:
            self._lengths[sequence] += 1
        return self._output(list(self._lengths), starts, [1] * len(starts))

    def _output(self, sequences: list[int], starts: list[int], counts: list[int]) -> Message:
        output = StepOutput(
            term=self._term,
            step=self._step,
            plan=self._plan,
            sequences=pack(sequences),
            starts=pack(starts),
            counts=pack(counts),
            tokens=pack((31 * sequence + 7 * self._step) % 3000 for sequence in sequences),
            finishes=bytes([Finish.NONE] * len(sequences)),
            elapsed_us=1000,
        )
        self._step += 1
        return Message(_STEPS_SUBJECT, encode(output))


@asynccontextmanager
async def scheduler(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens a scheduler with `ROWS` running sequences. The unit is a token."""
    broker = MemoryBroker()
    tap, peer = Tap(broker, out=subjects.PLAN, wrap=wrap), MemoryBus(broker)
    executor = _Executor(tap, peer)

    def on_attach(message: Message) -> None:
        peer.publish(message.reply, encode(Attached(AttachState.OPEN, (b"",), b"")))

    await peer.subscribe(f"{subjects.CLAIM}.exec", executor.on_claim)
    await peer.subscribe(f"{subjects.DETOKENIZER}.detok.attach", on_attach)
    service = Scheduler(Context(Settings(served_model_name=_MODEL), tap, "sched", tap.progress.notify))
    for row in range(ROWS):
        await peer.store.put_work(subjects.work_queue(_MODEL, 0, subjects.ANY), encode(_work(row)))

    beating = asyncio.create_task(executor.beat())
    try:
        async with serving(service, tap.progress, lambda: service.heartbeat().ready):
            await executor.start()
            yield executor
    finally:
        beating.cancel()


def _work(row: int) -> WorkItem:
    """Returns an item with a prompt of 16 to 31 tokens, so that sequences need their next block in different steps."""
    prompt = [(31 * row + position) % 3000 for position in range(16 + row % 16)]
    sampling = Sampling(2000, pack_record(temperature=1.0), pack([0]), seed=row)
    return WorkItem(
        request_id=f"r{row}",
        detokenizer="detok",
        prompts=(pack(prompt),),
        n=1,
        sampling=sampling,
        priority=0,
        deadline=time.time() + 3600,
    )
