"""Detokenizer to gateway: figures of the latest requests, for the console."""

from typing import NamedTuple

from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.request_metrics import Metrics

LATEST_REQUESTS = 50
"""Requests that run, and requests that have ended, in one answer."""


class RequestFigures(NamedTuple):
    """The state of one request. Times are Unix times in seconds; 0: not yet, or unknown."""

    request_id: str
    """Id as services know it: `subjects.owned` by the tenant."""
    status: int
    """HTTP status that the request would have ended with: 200, or that of its error; 0: it runs."""
    began: float
    first_token: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    """Generated tokens so far."""
    metrics: Metrics | None
    """Times of its stages, once it has ended without an error."""


class RecentRequests(Wire, frozen=True):
    """Answer to a request at `pagewire.svc.recent_requests`."""

    model: str
    """Served name of the model."""
    requests: tuple[RequestFigures, ...]
    """The latest requests, oldest first."""
