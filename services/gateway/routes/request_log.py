"""The latest requests for text, for the console: ids, figures and times, and no text."""

import time
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from pagewire.client.stream import Stream
from pagewire.shared import subjects
from pagewire.shared.messages.client import Result
from pagewire.shared.messages.recent_requests import RecentRequests
from pagewire.shared.messages.request_metrics import Metrics

LENGTH = 500
"""Requests that are kept."""
NATS = "NATS"
"""Path of the requests that this gateway has not sent: NATS clients, and other gateways, did."""


class LoggedRequest(msgspec.Struct, eq=False):
    """One request. Times are Unix times in seconds."""

    request_id: str
    tenant: str
    path: str
    began: float
    stream: Stream | None
    """The request in the pipeline; None once it has ended."""
    model: str = ""
    status: int = 0
    """HTTP status of the answer; 0: it runs."""
    first_token: float = 0.0
    """When the first token came; 0: none has come, or the answer is no stream."""
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated tokens so far."""
    cached_tokens: int = 0
    metrics: Metrics | None = None
    """Times of its stages, once it has ended without an error."""
    change: int = 0
    """Number of its last change, counted over all requests."""

    def refresh(self) -> None:
        """Takes the figures of a request that runs."""
        if self.stream is not None:
            self.model = self.stream.model
            self.prompt_tokens = self.stream.prompt_tokens or 0
            self.tokens = self.stream.tokens


class RequestLog:
    """The requests that run, and the latest ones that have ended.

    Attributes:
        changes: number of changes so far.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._requests: OrderedDict[tuple[str, str], LoggedRequest] = OrderedDict()
        """By tenant and id."""

    def begin(self, stream: Stream, path: str, tenant: str) -> LoggedRequest:
        """Notes a request that is about to be sent."""
        request = LoggedRequest(stream.request_id, tenant, path, time.time(), stream)
        self._add(request)
        self._note(request)
        return request

    def end(self, request: LoggedRequest | None, status: int, result: Result | None) -> str:
        """Notes how a request has ended. Returns its id; empty: it was refused before it began.

        `result`: that of a request without a stream, if there is one.
        """
        if request is None:
            return ""
        request.refresh()
        final = None if request.stream is None else request.stream.final
        last = result or final
        request.stream = None
        request.status, request.ended = status, time.time()
        if last is not None:
            usage, request.metrics = last.usage, last.metrics
            request.prompt_tokens, request.tokens = usage.prompt_tokens, usage.completion_tokens
            request.cached_tokens = usage.cached_tokens
        self._note(request)
        return request.request_id

    def note_others(self, recent: RecentRequests) -> None:
        """Takes the figures of the latest requests of a detokenizer, except for those that this gateway has sent."""
        for figures in recent.requests:
            tenant, request_id = subjects.owner_and_text(figures.request_id)
            known = self._requests.get((tenant, request_id))
            if known is None:
                known = LoggedRequest(request_id, tenant, NATS, figures.began, None, recent.model)
                self._add(known)
            elif known.path != NATS or (known.tokens, known.ended) == (figures.tokens, figures.ended):
                continue
            known.status, known.ended, known.first_token = figures.status, figures.ended, figures.first_token
            known.prompt_tokens, known.cached_tokens = figures.prompt_tokens, figures.cached_tokens
            known.tokens, known.metrics = figures.tokens, figures.metrics
            self._note(known)

    def refresh(self) -> None:
        """Takes the figures of the requests that run."""
        for request in self._requests.values():
            if request.stream is not None:
                request.refresh()
                self._note(request)

    def changed(self, since: int, tenant: str | None) -> Iterator[LoggedRequest]:
        """Yields the requests of a tenant, or of everybody, that have changed since a number of changes."""
        if since < self.changes:
            for request in self._requests.values():
                if request.change > since and tenant in {None, request.tenant}:
                    yield request

    def find(self, request_id: str, tenant: str | None) -> LoggedRequest | None:
        """Returns a request of a tenant, or of anybody, by its id; None: it is not kept."""
        if tenant is not None:
            return self._requests.get((tenant, request_id))
        return next((request for request in self._requests.values() if request.request_id == request_id), None)

    def ended_since(self, moment: float) -> list[LoggedRequest]:
        """Returns the requests that have ended well since a Unix time."""
        return [request for request in self._requests.values() if request.ended > moment and request.metrics]

    def _add(self, request: LoggedRequest) -> None:
        self._requests[request.tenant, request.request_id] = request
        if len(self._requests) > LENGTH:
            self._requests.popitem(last=False)

    def _note(self, request: LoggedRequest) -> None:
        self.changes += 1
        request.change = self.changes
