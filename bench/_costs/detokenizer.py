"""The detokenizer: steps in, JSON frames of open streams out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from pagewire.bench._costs.rig import ROWS, Rig, serving
from pagewire.bench._costs.tap import Tap, Wrap
from pagewire.services.detokenizer.service import Detokenizer
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.abort import AbortedSequences
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.open import Encoding, Opened, OpenState, OpenStream
from pagewire.shared.messages.step import Finish, StepOutput
from pagewire.shared.process.context import Context
from pagewire.shared.settings.config import Settings

_PROMPT = 16
_VERBS = f"{subjects.DETOKENIZER}.detok"


class _Streams(Rig):
    """Streams that all grow by one token per step."""

    per_message = float(ROWS)

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._step = 0
        self._message = Message("", b"")

    @override
    def prepare(self) -> None:
        self._tap.sent.clear()
        step = self._step
        output = StepOutput(
            term=1,
            step=step,
            plan=1,
            sequences=pack(range(ROWS)),
            starts=pack([_PROMPT + step - 1 if step else 0] * ROWS),
            counts=pack([1 if step else _PROMPT] * ROWS),
            tokens=pack(500 + (31 * row + 7 * step) % 2500 for row in range(ROWS)),
            finishes=bytes([Finish.NONE] * ROWS),
            elapsed_us=1000,
        )
        self._message = Message(f"{subjects.STEPS}.exec", encode(output))
        self._step += 1

    @override
    async def turn(self) -> float:
        self._tap.feed(f"{subjects.STEPS}.*", self._message)
        assert len(self._tap.sent) == ROWS
        return ROWS


@asynccontextmanager
async def detokenizer(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens a detokenizer with `ROWS` streams. The unit is a token."""
    broker = MemoryBroker()
    tap, peer = Tap(broker, out="_INBOX", wrap=wrap), MemoryBus(broker)

    def on_abort(message: Message) -> None:
        peer.publish(message.reply, encode(AbortedSequences(1)))

    await peer.subscribe(f"{subjects.ABORT}.sched.abort", on_abort)
    service = Detokenizer(Context(Settings(model="bundled"), tap, "detok", tap.progress.notify))
    async with serving(service, tap.progress, lambda: service.heartbeat().ready):
        for row in range(ROWS):
            opened = await peer.request(f"{_VERBS}.open", encode(_open(row)), timeout=10)
            assert Decoder(Opened).decode(opened.data).state == OpenState.OPENED
            attached = await peer.request(f"{_VERBS}.attach", encode(_attach(row)), timeout=10)
            assert Decoder(Attached).decode(attached.data).state == AttachState.OPEN
        yield _Streams(tap)


def _open(row: int) -> OpenStream:
    return OpenStream(
        request_id=f"r{row}",
        digest=b"digest",
        reply=f"_INBOX.{row}",
        encoding=Encoding.JSON,
        stream=True,
        prompts=(b"",),
        prompt_lengths=pack([_PROMPT]),
        n=1,
        stop=(),
        stop_token_ids=(),
        include_stop=False,
        skip_special=True,
        min_tokens=0,
        timeout_ms=600_000,
    )


def _attach(row: int) -> Attach:
    return Attach(
        request_id=f"r{row}",
        term=1,
        generation=1,
        scheduler="sched",
        executor="exec",
        ack=f"$JS.ACK.memory.m.{row}.1",
        first_sequence=row,
        tokens=(b"",),
    )
