"""Ends a stream that is over: stores its record, sends its last frames, ends its work item.

The record belongs to the store from then on: for two minutes a repeated request, or a redelivered item, finds there how
the request ended. A crash at any point does no harm, because the work item goes last: another detokenizer finds the
item, with or without the record, or nothing left to do.
"""

import asyncio
import time

import structlog
from opentelemetry.trace import format_trace_id

from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.metrics import StreamMetrics
from pagewire.services.detokenizer.record_writer import RecordWriter
from pagewire.services.detokenizer.spans import end_span
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages import encode

DELIVERY_TIMEOUT = 10.0
"""Seconds for which slow subscribers delay the end of the work item. Later frames are sent all the same."""
_log = structlog.get_logger()


class Finalizer:
    """Finalizes streams, each in a task of its own.

    A store that is full or gone delays the last frame by at most `record_writer.WRITE_TIMEOUT`: the ended stream is in
    memory then, and its record is written later.
    """

    def __init__(
        self,
        bus: Bus,
        tasks: asyncio.TaskGroup,
        registry: Registry,
        sender: FrameSender,
        records: RecordWriter,
        metrics: StreamMetrics,
    ) -> None:
        self._metrics = metrics
        self._bus = bus
        self._records = records
        self._tasks = tasks
        self._registry = registry
        self._sender = sender
        self._running: set[asyncio.Task[None]] = set()

    def start(self, stream: Stream) -> None:
        """Takes over a stream to which nothing is added any more, unless it was over before.

        A frame that cannot be sent may have ended it while its other frames were sent.
        """
        if stream.state is not StreamState.OPEN:
            return
        stream.state = StreamState.FINALIZING
        stream.times.note_end()
        if stream.deadline is not None:
            stream.deadline.cancel()
        task = self._tasks.create_task(self._finalize(stream))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self, timeout: float) -> None:
        """Waits until the streams taken over so far are finalized and recorded, at most `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)
        await self._records.drain(max(0.0, deadline - loop.time()))

    def end_work(self, ack: str) -> None:
        """Ends a work item of a request that has ended before."""
        self._tasks.create_task(self._end_work(ack))

    def return_work(self, ack: str) -> None:
        """Has the queue deliver the work item of a request again at once."""
        self._tasks.create_task(self._return_work(ack))

    async def _finalize(self, stream: Stream) -> None:
        # A request that ended without an answer may be sent again, and runs then. A scheduler that gets the work twice
        # would take the record of the first attempt for the end of the second.
        if not stream.may_start_again:
            await self._records.write(stream.request_id, encode(stream.record()))
        stream.state = StreamState.ENDED
        self._registry.move_to_ended(stream)
        _report(stream)
        self._metrics.on_end(stream)
        self._sender.enqueue(stream)
        self._sender.drain()
        if stream.subscribers:
            try:
                async with asyncio.timeout(DELIVERY_TIMEOUT):
                    await stream.delivered.wait()
            except TimeoutError:
                _log.warning("frames_not_read", request_id=stream.request_id, seconds=DELIVERY_TIMEOUT)
        # This follows the frames on the same connection, so the broker's answer confirms that it has the frames too.
        if stream.attachment is not None:
            await self._end_work(stream.attachment.ack)

    async def _end_work(self, ack: str) -> None:
        try:
            await self._bus.store.end_work(ack)
        except BusError as error:
            _log.warning("item_not_ended", reason=str(error))  # the queue delivers it again, and it is ended then

    async def _return_work(self, ack: str) -> None:
        try:
            await self._bus.store.return_work(ack)
        except BusError as error:
            _log.warning("item_not_returned", reason=str(error))  # the queue delivers it again when it is not renewed


def _report(stream: Stream) -> None:
    """Writes the log line of a request and ends its span."""
    finishes = [completion.finish or "" for completion in stream.completions]
    outcome = stream.error.kind if stream.error is not None else ",".join(finishes)
    context = stream.span.get_span_context()
    trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
    began, first = stream.opened_at, stream.first_token_at
    _log.info(
        "request_ended",
        request_id=stream.request_id,
        trace_id=trace_id,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        tokens=stream.tokens,
        finish=outcome,
        first_token_ms=round((first - began) * 1000, 1) if first else None,
        ms=round((time.monotonic() - began) * 1000, 1),
    )
    end_span(stream.span, stream)
