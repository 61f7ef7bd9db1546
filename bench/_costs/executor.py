"""The executor on a device that takes no time: plans in, steps of decode rows out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from pagewire.bench._costs.rig import ROWS, Rig, serving
from pagewire.bench._costs.tap import Tap, Wrap
from pagewire.services.executor.service import Executor
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.plan import AddSlot, Claim, Claimed, Plan
from pagewire.shared.messages.work import Sampling
from pagewire.shared.models import model_folder
from pagewire.shared.process.context import Context
from pagewire.shared.sampling_parameters import pack_record
from pagewire.shared.settings.config import Settings

_BLOCK = 16
_PROMPT = 64
_STEPS = 16
"""Steps in a turn."""
_PLANS = f"{subjects.PLAN}.exec"


class _Scheduler(Rig):
    """A scheduler that extends the lease by one step in every plan, and gives each sequence its next block in time."""

    per_message = float(ROWS)

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._number = self._lease = 0
        self._held = [2 * _PROMPT // _BLOCK] * ROWS
        self._messages: list[Message] = []

    async def start(self) -> None:
        """Fills the slots and lets the prompts be computed."""
        self._tap.feed(_PLANS, self._plan(added=tuple(_add(slot, self._held[slot]) for slot in range(ROWS))))
        await self._tap.progress.until(lambda: len(self._tap.sent) == 1)

    @override
    def prepare(self) -> None:
        self._tap.sent.clear()
        self._messages = [self._plan() for _ in range(_STEPS)]

    @override
    async def turn(self) -> float:
        for message in self._messages:
            self._tap.feed(_PLANS, message)
        await self._tap.progress.until(lambda: len(self._tap.sent) == _STEPS)
        return ROWS * _STEPS

    def _plan(self, added: tuple[AddSlot, ...] = ()) -> Message:
        self._number += 1
        self._lease += 1
        grown = [] if added else [slot for slot in range(ROWS) if (slot + self._number) % _BLOCK == 0]
        for slot in grown:
            self._held[slot] += 1
        plan = Plan(
            term=1,
            number=self._number,
            removed=b"",
            added=added,
            blocks=pack(value for slot in grown for value in (slot, slot)),
            limits=pack(value for slot in grown for value in (slot, self._held[slot] * _BLOCK)),
            order=b"",
            budget=_PROMPT * ROWS,
            lease_until=self._lease,
        )
        return Message(_PLANS, encode(plan))


@asynccontextmanager
async def executor(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens an executor with `ROWS` slots in use. The unit is a token."""
    settings = Settings(model="bundled", device="sim:zero", max_num_seqs=ROWS, block_size=_BLOCK)
    broker = MemoryBroker()
    tap, peer = Tap(broker, out=subjects.STEPS, wrap=wrap), MemoryBus(broker)
    service = Executor(Context(settings, tap, "exec", tap.progress.notify))
    async with serving(service, tap.progress, lambda: service.heartbeat().ready):
        claim = Claim("sched", 1, model_folder.served_name(settings))
        answer = await peer.request(f"{subjects.CLAIM}.exec", encode(claim), timeout=10)
        assert Decoder(Claimed).decode(answer.data).accepted
        rig = _Scheduler(tap)
        await rig.start()
        yield rig


def _add(slot: int, blocks: int) -> AddSlot:
    return AddSlot(
        slot=slot,
        sequence=slot,
        tokens=pack(range(1, 1 + _PROMPT)),
        prompt_tokens=_PROMPT,
        computed=0,
        blocks=pack(range(blocks)),
        limit=blocks * _BLOCK,
        sampling=Sampling(1900, pack_record(temperature=1.0), pack([0]), seed=slot),
        prompt_index=0,
        choice_index=0,
        trace="",
    )
