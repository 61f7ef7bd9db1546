"""The end of a request, in the order in which a crash at any point does no harm."""

import asyncio

import structlog
from opentelemetry.trace import format_trace_id

from pagewire.services.detokenizer.mailbox import Outbox
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.stream import Stream, StreamState
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, MessageTooLarge
from pagewire.shared.messages import encode

RETRY = 0.5
"""Seconds between two attempts to store a record."""
PATIENCE = 10.0
"""Seconds that lagging readers hold up the end of the work item. Their frames are sent after that too."""

_log = structlog.get_logger()


class Ending:
    """Stores the record, sends the last frames, then ends the work item: whoever dies in between, the next one finds
    either the item and the record, or nothing left to do."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, registry: Registry, outbox: Outbox) -> None:
        self._bus = bus
        self._tasks = tasks
        self._registry = registry
        self._outbox = outbox
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, stream: Stream) -> None:
        """The stream is over: nothing is added to it from here on."""
        stream.state = StreamState.ENDING
        if stream.deadline is not None:
            stream.deadline.cancel()
        task = self._tasks.create_task(self._end(stream))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settle(self, timeout: float) -> None:
        """Waits until every stream that is over has come to its end, at most `timeout` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    def end_item(self, ack: str) -> None:
        """Ends a work item whose request was over before."""
        self._tasks.create_task(self._end_item(ack))

    async def _end(self, stream: Stream) -> None:
        await self._store(stream)
        stream.state = StreamState.ENDED
        self._registry.retire(stream)
        self._report(stream)
        self._outbox.post(stream)
        self._outbox.drain()
        if stream.mailboxes:
            try:
                async with asyncio.timeout(PATIENCE):
                    await stream.delivered.wait()
            except TimeoutError:
                _log.warning("frames_not_read", request_id=stream.request_id, seconds=PATIENCE)
        # The broker gets this behind the frames, on the same connection: by its answer it has them too.
        if stream.attachment is not None:
            await self._end_item(stream.attachment.ack)

    async def _store(self, stream: Stream) -> None:
        record = encode(stream.record())
        while True:
            try:
                await self._bus.store.put_done(stream.request_id, record)
            except MessageTooLarge as error:
                _log.error("record_too_large", request_id=stream.request_id, reason=str(error))
                return
            except BusError as error:
                _log.warning("record_not_stored", request_id=stream.request_id, reason=str(error), retry_in=RETRY)
                await asyncio.sleep(RETRY)
            else:
                return

    async def _end_item(self, ack: str) -> None:
        try:
            await self._bus.store.end_work(ack)
        except BusError as error:
            _log.warning("item_not_ended", reason=str(error))  # it is delivered again, and ended then

    def _report(self, stream: Stream) -> None:
        finishes = [completion.finish or "" for completion in stream.completions]
        outcome = stream.error.kind if stream.error is not None else ",".join(finishes)
        context = stream.span.get_span_context()
        trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        _log.info(
            "request_ended", request_id=stream.request_id, trace_id=trace_id, tokens=stream.tokens, finish=outcome
        )
        stream.span.set_attributes({"request_id": stream.request_id, "tokens": stream.tokens, "finish": outcome})
        stream.span.end()
