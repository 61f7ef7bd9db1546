"""One request as its client sees it: sent, put in order, resumed after a loss, and ended exactly once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from pagewire.client import frames
from pagewire.client.batch_inbox import BatchInbox
from pagewire.client.directory import Directory
from pagewire.client.mailbox import Mailbox
from pagewire.client.sequencer import Sequencer
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS
from pagewire.shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    MessageTooLarge,
    NoResponders,
    PagewireError,
    PayloadTooLarge,
)
from pagewire.shared.messages.client import (
    BATCH_INBOX,
    FRESH,
    Accepted,
    Delta,
    ErrorFrame,
    Final,
    GenerateRequest,
    Result,
    ResumeRequest,
)

SILENCE = 3.0
"""Seconds without a frame after which a stream asks for what it may have missed."""
RESULT_SILENCE = 15.0
"""The same for a request without a stream, which hears nothing until it ends."""
GRACE = 5.0
"""Seconds past the deadline after which a request is given up here, should the pipeline not have said so itself."""
PATIENCE = 15.0
"""Seconds for which a request waits for a tokenizer that has answered before: long enough for one to start again."""
TICK = 0.5
"""Seconds between two looks at the clock; also between two recoveries."""


class Stream:
    """One request. `async for delta in stream` sends it; leaving the loop early cancels it.

    Attributes:
        request_id: the id of the request.
        model: the served name; when it was not given, known once frames arrive.
        prompt_tokens: of all prompts; None until the request was accepted.
        final: how the stream ended, with its usage; None until then.
    """

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        batch_inbox: BatchInbox,
        model: str,
        request: GenerateRequest,
        body: Mapping[str, Any],
        traceparent: str = "",
        *,
        fresh: bool = False,
    ) -> None:
        """`body` is what is sent: the request without what was left out. `fresh`: the id was drawn for this request."""
        self.request_id = request.request_id or ""
        self.prompt_tokens: int | None = None
        self.final: Final | None = None
        self._bus = bus
        self._directory = directory
        self._batch_inbox = batch_inbox
        self.model = model
        self._sent = dict(body)
        self._timeout = request.timeout_ms / 1000
        self._headers = frames.MSGPACK | ({"traceparent": traceparent} if traceparent else {})
        self._fresh = fresh
        self._inbox = ""
        self._sequencer = Sequencer(request.sampling.n * _count_prompts(request))
        self._mailbox = Mailbox()
        self._waiter: asyncio.Future[None] | None = None
        self._subject = self._resume = ""
        self._cancel = f"{subjects.CANCEL}.{self.request_id}"
        self._body = b""
        self._known = self._over = self._unheard = False
        self._result: Result | None = None
        self._held: Final | None = None
        self._error: PagewireError | None = None
        self._heard = self._asked = self._patient_until = 0.0

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """One delta per token; a reader that lags gets several in one.

        Raises:
            RequestError: the request has failed.
            BusUnavailable: there is no connection.
        """
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    def batches(self) -> AsyncGenerator[list[Delta], None]:
        """Like the iteration itself, but all that has arrived at once: cheaper where many are written together."""
        self._sent["stream"] = True
        return self._exchange(SILENCE)

    async def result(self) -> Result:
        """Sends the request without a stream; returns its whole result. Raises what the iteration raises."""
        self._sent["stream"] = False
        async with aclosing(self._exchange(RESULT_SILENCE)) as batches:
            async for _ in batches:
                raise Internal("deltas came where one result was asked for")
        if self._result is None:
            raise Internal("a stream came where one result was asked for")
        return self._result

    async def cancel(self) -> str:
        """Ends the request; its usage is still reported. Returns cancelled, ended or unknown.

        Raises:
            BusError: nobody answers.
        """
        return await frames.cancel(self._bus, self._cancel)

    async def _exchange(self, silence: float) -> AsyncGenerator[list[Delta], None]:
        self.model = await self._directory.resolve(self.model)
        self._subject = f"{subjects.GENERATE}.{subjects.model_token(self.model)}"
        try:
            self._body = frames.encode(self._sent)
        except OverflowError as error:
            raise InvalidRequest("a number in the request has more than 64 bits") from error
        with (
            self._bus.inbox(self._on_message) as self._inbox,
            self._batch_inbox.reading(self._inbox, self._on_delta) as self._headers[BATCH_INBOX],
        ):
            headers = self._headers | ({FRESH: "1"} if self._fresh else {})
            watch = asyncio.create_task(self._watch(silence))
            try:
                self._bus.publish(self._subject, self._body, reply=self._inbox, headers=headers)
                loop = asyncio.get_running_loop()
                while (batch := self._mailbox.take()) or not self._over:
                    if batch:
                        yield batch
                    else:
                        self._waiter = loop.create_future()
                        await self._waiter
                if isinstance(self._error, NoResponders):
                    raise await self._directory.absence(self.model) from self._error
                if self._error is not None:
                    raise self._error
            except MessageTooLarge as error:
                self._over = True
                raise PayloadTooLarge(str(error)) from error
            finally:
                watch.cancel()
                if not self._over:
                    self._abandon()

    def _on_message(self, message: Message) -> None:
        if self._over:
            return
        self._heard = time.monotonic()
        if not message.data:
            self._on_empty(message)
            return
        try:
            frame = frames.decode(message.data)
        except Internal as error:
            self._end(error)
            return
        if isinstance(frame, Delta):
            self._on_delta(frame)
        elif isinstance(frame, Accepted):
            self._known = True
            self._directory.answered.add(self.model)
            self._cancel, self._resume = frame.cancel, frame.resume
            self.prompt_tokens = frame.prompt_tokens
        elif isinstance(frame, Final):
            self._on_final(frame)
        elif isinstance(frame, Result):
            self._result = frame
            self._directory.answered.add(self.model)
            self._end()
        elif isinstance(frame, ErrorFrame):
            self._end(frames.error_of(frame))

    def _on_delta(self, delta: Delta) -> None:
        if self._over:
            return
        self._heard = time.monotonic()
        if self._sequencer.is_next(delta):
            self._mailbox.put(delta)
            if self._held is not None:
                self._on_final(self._held)
            self._wake()
        elif self._sequencer.is_early(delta):
            self._recover()

    def _on_final(self, final: Final) -> None:
        """Ends the stream, unless tokens are missing: then the end is held back until they have come."""
        if self._sequencer.received >= final.usage.completion_tokens:
            self.final = final
            self._end()
        elif self._held is None:
            self._held = final
            self._recover()

    def _on_empty(self, message: Message) -> None:
        """The end of a stream whose last frame did not come, or the broker's word that nobody listens."""
        if message.headers.get(STATUS) != NO_RESPONDERS:
            self._recover()
        elif self._known:
            self._resume = ""  # its detokenizer is gone: at the next silence the request itself is sent again
        elif self.model in self._directory.answered and self._heard < self._patient_until:
            self._unheard = True  # its tokenizer starts again: the next look at the clock sends the request to it
        else:
            self._end(NoResponders(f"nobody answers at {self._subject}"))

    async def _watch(self, silence: float) -> None:
        """Looks at the clock: asks again after a silence, and gives up long after the deadline."""
        self._heard = time.monotonic()
        self._patient_until = self._heard + PATIENCE
        deadline = self._heard + self._timeout + GRACE
        while not self._over:
            await asyncio.sleep(TICK)
            if time.monotonic() > deadline:
                self._abandon()
                self._end(DeadlineExceeded("the deadline has passed and the pipeline does not answer"))
            elif self._unheard or time.monotonic() - self._heard > silence:
                self._heard = time.monotonic()
                self._unheard = False
                self._recover()

    def _recover(self) -> None:
        """Asks for what is missing. Without a known stream the request is sent again: it is attached to its first."""
        now = time.monotonic()
        if now - self._asked < TICK:
            return
        self._asked = now
        with suppress(BusUnavailable):  # the next silence tries again
            if self._resume:
                self._publish(self._resume, frames.encode(ResumeRequest(self._sequencer.resume_from)))
            else:
                self._publish(self._subject, self._body)

    def _publish(self, subject: str, body: bytes) -> None:
        self._bus.publish(subject, body, reply=self._inbox, headers=self._headers)

    def _abandon(self) -> None:
        with suppress(BusUnavailable):  # without a connection the pipeline notices by itself that nobody reads
            self._bus.publish(self._cancel, b"")

    def _end(self, error: PagewireError | None = None) -> None:
        self._error = error
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _count_prompts(request: GenerateRequest) -> int:
    match request.prompt:
        case [str() | list(), *_] as prompts:
            return len(prompts)
        case _:
            return 1
