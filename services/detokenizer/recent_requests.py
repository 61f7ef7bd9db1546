"""Tells the gateway, whose console shows them, of the latest requests, whoever has sent them."""

from itertools import islice

from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.messages import encode
from pagewire.shared.messages.recent_requests import LATEST_REQUESTS, RecentRequests, RequestFigures

CANCELLED = 499
"""Status of a request that was cancelled, as nginx writes it."""


class RecentRequestsResponder:
    """Answers with the figures of the streams in memory."""

    def __init__(self, bus: Bus, registry: Registry, model: str) -> None:
        """`model`: served name of the model."""
        self._bus = bus
        self._registry = registry
        self._model = model

    def answer(self, message: Message) -> None:
        """Answers a gateway."""
        if subjects.is_client_inbox(message.reply):
            latest = [*islice(self._registry.latest_ended, LATEST_REQUESTS)][::-1]
            latest += [*islice(self._registry.latest_open, LATEST_REQUESTS)][::-1]
            self._bus.publish(message.reply, encode(RecentRequests(self._model, tuple(map(figures_of, latest)))))


def figures_of(stream: Stream) -> RequestFigures:
    """Returns the figures of a request."""
    times, ended = stream.times, stream.state is StreamState.ENDED
    return RequestFigures(
        request_id=stream.request_id,
        status=_status_of(stream) if ended else 0,
        began=times.arrived,
        first_token=times.answered,
        ended=times.ended if ended else 0.0,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        tokens=stream.tokens,
        metrics=times.metrics() if ended and stream.error is None else None,
    )


def _status_of(stream: Stream) -> int:
    if stream.error is not None:
        return stream.error.code
    return CANCELLED if any(completion.finish == "cancelled" for completion in stream.completions) else 200
