"""Removes subscribers whose clients have gone, and cancels the streams that nobody reads any more."""

import time

import structlog

from pagewire.services.detokenizer.frames.disconnect_monitor import DisconnectMonitor
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.services.detokenizer.streams import Streams

REPEAT_WITHIN = 10.0
"""Seconds for which a request goes on whose last client has left because its connection broke: within them its user may
send it again."""
_log = structlog.get_logger()


class LeavingClients:
    """The clients that have left, by themselves or unnoticed."""

    def __init__(self, registry: Registry, monitor: DisconnectMonitor, streams: Streams) -> None:
        self._registry = registry
        self._monitor = monitor
        self._streams = streams
        self._since: dict[str, float] = {}
        """Times, on the monotonic clock, at which the last client of an open stream has left, by request id."""

    def leave(self, stream: Stream, inbox: str) -> None:
        """Removes the subscriber with an inbox. Without another one the stream is cancelled after `REPEAT_WITHIN`."""
        subscriber = stream.find_subscriber(inbox)
        if subscriber is not None:
            stream.unsubscribe(subscriber)
            if not stream.subscribers and stream.state is StreamState.OPEN:
                self._since[stream.request_id] = time.monotonic()

    def check(self) -> None:
        """Removes subscribers that have disconnected, and cancels the streams that have none left."""
        subscribers = (subscriber for stream in self._registry.open for subscriber in stream.subscribers)
        for subscriber in self._monitor.check(subscribers):
            subscriber.stream.unsubscribe(subscriber)
            if not subscriber.stream.subscribers:
                self._cancel(subscriber.stream)
        now = time.monotonic()
        for request_id, left_at in list(self._since.items()):
            stream = self._registry.find(request_id)
            if stream is None or stream.subscribers:
                del self._since[request_id]
            elif now - left_at >= REPEAT_WITHIN:
                del self._since[request_id]
                self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        if self._streams.cancel(stream, abandoned=True):
            _log.info("client_gone", request_id=stream.request_id)
