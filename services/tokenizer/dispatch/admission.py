"""Refuses requests that would wait too long, and says when a refused client should come back.

A request waits for the requests ahead of it: the unstarted ones of its own class and of more urgent classes. They start
at a rate that the schedulers measure. More urgent requests that come within `AGEING` seconds go ahead of it too; after
that the schedulers let it overtake younger ones.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import Overloaded
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.process.peers import SILENCE, Peers

MARGIN = 0.8
"""Share of the permitted time that the expected wait may take; the rest is for errors of the estimate."""
AGEING = 10.0
"""Seconds after which requests of a more urgent class no longer overtake a waiting one."""
MAX_AGE = 1.0
"""Seconds after a report for which requests are assumed to start at the reported rate."""
MAX_UNCOUNTED = 100_000
"""Requests of a class that are remembered while no scheduler reports: as many as the store takes."""
UNKNOWN_RETRY_MS = 1000
"""Time after which a refused client should come back while no rate is known."""
MIN_RETRY_MS = 100
"""Shortest time after which a refused client should come back."""
MAX_RETRY_MS = 3600 * 1000
"""Longest time after which a refused client should come back."""

_CLASSES = range(len(subjects.CLASSES))
_backlog = Decoder(Backlog)


@dataclass(frozen=True, slots=True)
class Load:
    """The queue of all replicas of a model. Sequences have one entry per class, as `subjects.CLASSES` orders them."""

    waiting: Sequence[float] = (0.0,) * len(_CLASSES)
    """Requests that have not started."""
    starts: Sequence[float] = (0.0,) * len(_CLASSES)
    """Requests that have started per second lately."""
    rate: float = 0.0
    """Requests that can start per second while all slots are in use; 0: unknown."""
    free: float = math.inf
    """Requests that could start at once."""
    last: int = 0
    """Number in the store of the last request in `waiting`."""
    delay: float = 0.0
    """Seconds by which requests start later than at `rate`, because the running ones have begun only lately."""


def expected_wait(load: Load, rank: int, others: float = 0.0) -> float | None:
    """Returns the seconds until a new request of the class with index `rank` starts; None: unknown.

    `others` is the number of requests ahead that `load` does not count.

    >>> expected_wait(Load(waiting=(0, 9, 0), rate=5.0, free=0), rank=1)
    2.0
    """
    ahead = sum(load.waiting[: rank + 1]) + others + 1 - load.free
    if ahead <= 0:
        return 0.0
    if not load.rate:
        return None
    overtaking = sum(load.starts[:rank])
    left = load.rate - overtaking
    wait = ahead / left if left > 0 else math.inf
    return load.delay + min(wait, (ahead + overtaking * AGEING) / load.rate)


def combine(reports: Sequence[Backlog], counted: Backlog, before: float) -> Load:
    """Returns the load that the reports of all schedulers describe.

    `counted` is the report that has the lengths of the queues, `before` the last known rate. A replica that does not
    know its rate, because it has just begun, is taken for one like the others.
    """
    started = [sum(report.started[rank] for report in reports) for rank in _CLASSES]
    rates = [report.rate for report in reports if report.rate]
    rate = sum(rates)
    running = sum(1 for report in reports if report.rate or report.free)
    return Load(
        waiting=[max(0, stored - begun) for stored, begun in zip(counted.stored, started, strict=True)],
        starts=[sum(report.starts[rank] for report in reports) for rank in _CLASSES],
        rate=rate / len(rates) * running if rates else before,
        free=sum(report.free for report in reports),
        last=counted.last,
        delay=sum(report.delay * report.rate for report in reports) / rate if rates else 0.0,
    )


class Admission:
    """Admits requests for one model.

    Attributes:
        refused: requests refused so far.
    """

    def __init__(
        self, bus: Bus, model: str, peers: Peers, in_progress: Callable[[], int], max_wait: float | None
    ) -> None:
        """`model` is the model's token in subjects; `in_progress` returns how many requests are being dispatched here;
        `max_wait` is the setting `max_queue_wait` in seconds. `peers` must listen to tokenizers."""
        self.refused = 0
        self._bus = bus
        self._model = model
        self._peers = peers
        self._in_progress = in_progress
        self._max_wait = math.inf if max_wait is None else max_wait
        self._reports: dict[str, tuple[Backlog, float]] = {}
        self._load = Load()
        self._reported_at = 0.0
        self._tokenizers = 1
        self._uncounted: list[deque[int]] = [deque(maxlen=MAX_UNCOUNTED) for _ in _CLASSES]
        """Numbers in the store of the requests from this tokenizer that no report has counted yet, by class."""

    async def listen(self) -> None:
        """Subscribes to the reports of the schedulers."""
        await self._bus.subscribe(f"{subjects.BACKLOG}.{self._model}.*", self._on_report)

    def on_stored(self, priority: int, number: int) -> None:
        """Counts a stored request as waiting until a report does. `number` is its number in the store."""
        if number > self._load.last:
            self._uncounted[subjects.class_of(priority)].append(number)

    @property
    def may_refuse(self) -> bool:
        """Whether there is a queue, so that a request may have to be refused. This is cheaper than `refusal`."""
        wait = self._wait(_CLASSES[-1])
        return wait is not None and wait > 0

    def refusal(self, priority: int, timeout: float) -> Overloaded | None:
        """Returns the error for a request with a deadline in `timeout` seconds; None: it is admitted."""
        wait = self._wait(subjects.class_of(priority))
        if wait is None or wait <= MARGIN * min(self._max_wait, timeout):
            return None
        self.refused += 1
        limit = "its timeout_ms" if timeout < self._max_wait else "max-queue-wait"
        message = f"the wait of {wait:.1f} s is too long for {limit}: send the request again later"
        return Overloaded(message, _retry_ms(wait))

    def retry_after_ms(self, priority: int) -> int:
        """Returns the milliseconds after which a client that is refused for another reason should come back."""
        wait = self._wait(subjects.class_of(priority))
        return UNKNOWN_RETRY_MS if wait is None else _retry_ms(wait)

    @property
    def gauges(self) -> Mapping[str, float]:
        """Requests refused so far, requests that wait, and seconds that the next one would wait."""
        wait = self._wait(subjects.class_of(0))
        return {"refused": self.refused, "queued": sum(self._load.waiting), "expected_wait": wait or 0.0}

    def metrics(self) -> Iterator[Sample]:
        """Yields the metrics of refusals and waits."""
        yield table.ADMISSION_REFUSALS.sample(self.refused)
        yield table.EXPECTED_WAIT.sample(self.gauges["expected_wait"])

    def _wait(self, rank: int) -> float | None:
        load = self._load
        # Clients' requests are spread evenly, so the other tokenizers have sent as much since the last report.
        sent = sum([len(self._uncounted[i]) for i in range(rank + 1)]) + self._in_progress()
        started = load.rate * min(MAX_AGE, time.monotonic() - self._reported_at)
        return expected_wait(load, rank, sent * self._tokenizers - started)

    def _on_report(self, message: Message) -> None:
        report = _backlog.try_decode(message.data)
        if report is None:
            return
        now = time.monotonic()
        self._reports[report.scheduler] = report, now
        if not report.stored:
            return
        self._reports = {name: last for name, last in self._reports.items() if now - last[1] < SILENCE}
        restarted = report.last < self._load.last  # the store is a new one
        self._load = combine([each for each, _ in self._reports.values()], report, self._load.rate)
        self._reported_at = now
        self._tokenizers = max(1, len(self._peers.alive("tokenizer")))
        for numbers in self._uncounted:
            uncounted = [number for number in numbers if number > report.last and not restarted]
            numbers.clear()
            numbers.extend(uncounted)


def _retry_ms(wait: float) -> int:
    return round(min(max(wait * 1000, MIN_RETRY_MS), MAX_RETRY_MS))
