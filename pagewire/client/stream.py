"""One request of a client, whose frames are put in order and requested again after a loss."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from pagewire.client import frames
from pagewire.client.batch_inbox import BatchInbox
from pagewire.client.connection import wait_connected
from pagewire.client.delta_queue import DeltaQueue
from pagewire.client.directory import Directory
from pagewire.client.sequencer import Sequencer
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.bus.framing import NO_RESPONDERS, STATUS
from pagewire.shared.client_protocol.client_requests import encode_request
from pagewire.shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    Internal,
    MessageTooLarge,
    ModelNotFound,
    NoResponders,
    Overloaded,
    PagewireError,
    PayloadTooLarge,
    Unavailable,
)
from pagewire.shared.messages.client import (
    Accepted,
    ChatFormat,
    Delta,
    ErrorFrame,
    Final,
    GenerateRequest,
    Result,
    ResumeRequest,
)
from pagewire.shared.messages.client_headers import BATCH_INBOX, FRESH, LEAVES, REFUSED

FRAME_TIMEOUT = 3.0
"""Seconds without a frame after which a stream asks for missed frames."""
RESULT_TIMEOUT = 15.0
"""Seconds without a frame after which a request without a stream asks: it gets no frame until it ends."""
GRACE = 5.0
"""Seconds after the deadline in which the pipeline should end the request; then the client ends it."""
RETRY_FOR = 15.0
"""Seconds for which a request without responders is sent again, because the tokenizer may be restarting: its model was
served before, or a tokenizer took the request at first."""
SAME_ABSENCE = 1.0
"""Maximum seconds between two notices of no responders in one absence. After more, a tokenizer has taken the request in
between, or this process stood still: a new absence begins."""
OUTBOUND_ROOM = 16 << 20
"""Maximum bytes in the outbound buffer of the connection when a request is sent; the buffer holds twice as many."""
ROOM_TIMEOUT = 5.0
"""Seconds for which a request waits for room in the outbound buffer; then the connection takes or refuses it."""
ROOM_INTERVAL = 0.01
"""Seconds between two checks of the outbound buffer."""
CHECK_INTERVAL = 0.5
"""Seconds between two checks of the timeouts, and minimum time between two recoveries."""
RESEND_INTERVAL = 0.15
"""Seconds between two checks, and between two recoveries, while the tokenizer restarts and nobody takes the request."""


class Stream:
    """One request. `async for delta in stream` sends it; leaving the loop early cancels it.

    Attributes:
        request_id: id of the request.
        model: the served name; by default empty until the request is sent.
        prompt_tokens: number of tokens of all prompts; None until the request is accepted.
        chat_format: how to find tool calls and reasoning in the texts; None: there are none, or it is not accepted yet.
        prompt_token_ids: ids of each prompt, once it is accepted, if the request asks for `return_token_ids`.
        final: the last frame, with the usage; None until the stream ends.
    """

    __slots__ = (  # every frame reads some of them, and Python is slower with more than 30 attributes
        "__weakref__",
        "_absent_at",
        "_absent_since",
        "_accepted",
        "_batch_inbox",
        "_body",
        "_bus",
        "_cancel",
        "_deltas",
        "_directory",
        "_early_final",
        "_ended",
        "_error",
        "_fresh",
        "_headers",
        "_inbox",
        "_interval",
        "_last_frame_at",
        "_last_recovery_at",
        "_repeatable",
        "_resend",
        "_result",
        "_resume",
        "_resuming",
        "_sent",
        "_sequencer",
        "_subject",
        "_timeout",
        "_waiter",
        "chat_format",
        "final",
        "model",
        "prompt_token_ids",
        "prompt_tokens",
        "request_id",
    )

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
        repeatable: bool = False,
    ) -> None:
        """`body`: the fields of the request that the caller has set. `fresh`: whether the id is random, so that no
        earlier request can have it. `repeatable`: whether the request goes on for a while when it is left early."""
        self.request_id = request.request_id or ""
        self.prompt_tokens: int | None = None
        self.prompt_token_ids: list[list[int]] = []
        self.final: Final | None = None
        self.chat_format: ChatFormat | None = None
        self._bus = bus
        self._directory = directory
        self._batch_inbox = batch_inbox
        self.model = model
        self._sent = dict(body)
        self._timeout = request.timeout_ms / 1000
        self._headers = frames.MSGPACK | ({"traceparent": traceparent} if traceparent else {})
        self._fresh, self._repeatable = fresh, repeatable
        self._inbox = ""
        self._sequencer = Sequencer(request.sampling.n * _count_prompts(request))
        self._deltas = DeltaQueue()
        self._waiter: asyncio.Future[None] | None = None
        self._subject = self._resume = ""
        self._cancel = directory.subject(f"{subjects.CANCEL}.{self.request_id}")
        self._body = b""
        self._accepted = self._ended = self._resend = False
        self._resuming = False
        """Whether the stream has asked for missed frames and got none since."""
        self._result: Result | None = None
        self._early_final: Final | None = None
        self._error: PagewireError | None = None
        self._last_frame_at = self._last_recovery_at = 0.0
        self._absent_since = self._absent_at = 0.0
        """Times of the first and the last notice that nobody takes the request."""
        self._interval = CHECK_INTERVAL

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Yields one delta per token; for a slow reader, several tokens are merged into one delta.

        Raises:
            RequestError: the request has failed.
            BusUnavailable: there is no connection.
        """
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    def batches(self) -> AsyncGenerator[list[Delta], None]:
        """Yields all deltas that have arrived since the last batch: cheaper than single deltas."""
        self._sent["stream"] = True
        return self._exchange(FRAME_TIMEOUT)

    async def result(self) -> Result:
        """Sends the request without streaming; returns its result. Raises what the iteration raises."""
        self._sent["stream"] = False
        async with aclosing(self._exchange(RESULT_TIMEOUT)) as batches:
            async for _ in batches:
                break
        if self._result is None:
            raise Internal("the reply is a stream, although one result was requested")
        return self._result

    @property
    def tokens(self) -> int:
        """Number of tokens that have arrived so far, of all completions."""
        return self._sequencer.received

    async def cancel(self) -> str:
        """Cancels the request; its usage is still reported. Returns cancelled, ended or unknown.

        Raises:
            BusError: no service answers.
        """
        return await frames.cancel(self._bus, self._cancel)

    async def _exchange(self, timeout: float) -> AsyncGenerator[list[Delta], None]:
        await wait_connected(self._bus)
        self.model = await self._directory.resolve(self.model)
        await wait_connected(self._bus)  # the connection may have been lost meanwhile
        self._subject = self._directory.subject(f"{subjects.GENERATE}.{subjects.model_token(self.model)}")
        self._body = encode_request(self._sent, frames.ENCODER)
        with (
            self._bus.inbox(self._on_message) as self._inbox,
            self._batch_inbox.reading(self._inbox, self._on_delta) as self._headers[BATCH_INBOX],
        ):
            headers = self._headers | ({FRESH: "1"} if self._fresh else {})
            watch = asyncio.create_task(self._watch(timeout))
            try:
                await self._wait_for_room()
                self._bus.publish(self._subject, self._body, reply=self._inbox, headers=headers)
                loop = asyncio.get_running_loop()
                while (batch := self._deltas.take()) or not self._ended:
                    if batch:
                        yield batch
                    else:
                        self._waiter = loop.create_future()
                        await self._waiter
                if self._error is not None:
                    raise await self._take_error(self._error)
            except MessageTooLarge as error:
                self._ended = True
                raise PayloadTooLarge(str(error)) from error
            finally:
                watch.cancel()
                if not self._ended:
                    self._abandon()

    async def _wait_for_room(self) -> None:
        """Waits while large requests before this one fill the outbound buffer, but at most `ROOM_TIMEOUT` seconds."""
        began = time.monotonic()
        while (  # noqa: ASYNC110 - the socket has no event for room
            (backlog := self._bus.backlog())
            and backlog + len(self._body) > OUTBOUND_ROOM
            and time.monotonic() - began < ROOM_TIMEOUT
            and not self._ended
        ):
            await asyncio.sleep(ROOM_INTERVAL)

    async def _take_error(self, error: PagewireError) -> PagewireError:
        """Returns the error to raise for the one that has ended the request, and keeps neither.

        The traceback of a raised error refers to this stream. If the stream also kept the error, the body of a refused
        request would stay in memory until the garbage collector runs.
        """
        self._error = None
        if isinstance(error, NoResponders | ModelNotFound):  # the tokenizer knows the name only as a token of subjects
            absence = await self._directory.absence(self.model)
            absence.__cause__ = error
            return absence
        return error

    def _on_message(self, message: Message) -> None:
        if self._ended:
            return
        self._last_frame_at = time.monotonic()
        resumed, self._resuming = self._resuming, False
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
            self._accepted = True
            self._interval = CHECK_INTERVAL
            self._directory.served.add(subjects.model_of(self._subject))
            self._cancel, self._resume = frame.cancel, frame.resume
            self.prompt_tokens = frame.prompt_tokens
            self.chat_format = frame.chat_format
            self.prompt_token_ids = frame.prompt_token_ids or []
        elif isinstance(frame, Final):
            self._on_final(frame)
        elif isinstance(frame, Result):
            self._result = frame
            self._directory.served.add(subjects.model_of(self._subject))
            self._end()
        elif isinstance(frame, ErrorFrame):
            self._on_error(frame, refused=REFUSED in message.headers, resumed=resumed)

    def _on_delta(self, delta: Delta) -> None:
        if self._ended:
            return
        self._last_frame_at = time.monotonic()
        self._resuming = False
        if self._sequencer.is_next(delta):
            self._deltas.put(delta)
            if self._early_final is not None:
                self._on_final(self._early_final)
            self._wake()
        elif self._sequencer.is_early(delta):
            self._recover()

    def _on_final(self, final: Final) -> None:
        """Ends the stream. If tokens are missing, keeps the frame until they have arrived."""
        if self._sequencer.received >= final.usage.completion_tokens:
            self.final = final
            self._end()
        elif self._early_final is None:
            self._early_final = final
            self._recover()

    def _on_error(self, frame: ErrorFrame, *, refused: bool, resumed: bool) -> None:
        """Ends the stream, unless what was sent for an accepted request is refused for now, or cannot be resumed."""
        error = frames.error_of(frame)
        accepted = self._accepted or not self._sent["stream"]  # without a stream, nothing says that it is accepted
        if refused and resumed:
            self._resume = ""  # the request itself is sent again
        elif not (refused and isinstance(error, Overloaded | Unavailable) and self._sent_again and accepted):
            self._end(error)

    def _on_empty(self, message: Message) -> None:
        """Handles the end of a stream whose final frame was lost, and the broker's notice of no responders."""
        if message.headers.get(STATUS) != NO_RESPONDERS:
            self._recover()
        elif self._accepted:
            self._resume = ""  # the detokenizer has ended: after the next timeout the request itself is sent again
        elif (
            self._sent_again or subjects.model_of(self._subject) in self._directory.served
        ) and self._absent_for() < RETRY_FOR:
            self._resend, self._interval = True, RESEND_INTERVAL  # the tokenizer is restarting
        else:
            self._end(NoResponders(f"nobody subscribes to {self._subject}"))

    @property
    def _sent_again(self) -> bool:
        """Whether the request was sent again. At first a tokenizer took it, or it was lost with the connection."""
        return self._last_recovery_at > 0

    def _absent_for(self) -> float:
        """Returns the seconds for which nobody has taken the request, when another notice says so."""
        now = time.monotonic()
        if now - self._absent_at > SAME_ABSENCE:
            self._absent_since = now
        self._absent_at = now
        return now - self._absent_since

    async def _watch(self, timeout: float) -> None:
        """Recovers after `timeout` seconds without a frame, and soon after a reconnection, which may have lost frames.

        Ends the request `GRACE` seconds after its deadline.
        """
        self._last_frame_at = time.monotonic()
        deadline = self._last_frame_at + self._timeout + GRACE
        reconnections = self._bus.reconnections
        while True:
            await asyncio.sleep(self._interval)
            if self._ended:
                return
            if time.monotonic() > deadline:
                self._abandon()
                self._end(DeadlineExceeded("the deadline has passed and the pipeline does not answer"))
            elif (
                self._resend
                or self._bus.reconnections != reconnections
                or time.monotonic() - self._last_frame_at > timeout
            ):
                reconnections = self._bus.reconnections
                self._last_frame_at = time.monotonic()
                self._resend = False
                self._recover()

    def _recover(self) -> None:
        """Asks for missing frames. If none come, or the request is not accepted, sends it again: it joins the first."""
        now = time.monotonic()
        if now - self._last_recovery_at < self._interval:
            return
        self._last_recovery_at = now
        with suppress(BusUnavailable):  # tried again after the next timeout
            if self._resume and not self._resuming:
                self._resuming = True
                self._publish(self._resume, frames.encode(ResumeRequest(self._sequencer.resume_from)))
            else:
                self._publish(self._subject, self._body)

    def _publish(self, subject: str, body: bytes) -> None:
        self._bus.publish(subject, body, reply=self._inbox, headers=self._headers)

    def fail(self, error: PagewireError) -> None:
        """Ends the iteration with an error, unless it has ended. The request goes on, and whoever sends it again soon
        gets its text."""
        if not self._ended:
            self._end(error)

    def _abandon(self) -> None:
        with suppress(BusUnavailable):  # without a connection the pipeline itself notices that the reader is gone
            self._bus.publish(self._cancel, b"", headers={LEAVES: self._inbox} if self._repeatable else {})

    def _end(self, error: PagewireError | None = None) -> None:
        self._error = error
        self._ended = True
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
