"""Counts starts, tokens and ends of requests, for the rate at which requests can start."""

from collections.abc import Iterable

from pagewire.services.scheduler.policy.event_rate import EventRate
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.service_rate import ServiceRate
from pagewire.services.scheduler.request import Request
from pagewire.shared import subjects


class ServiceMeter:
    """The starts, tokens and ends of requests. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._starts = [EventRate(now) for _ in subjects.CLASSES]
        self._rate: ServiceRate | None = None
        self._sampled_at = now
        self._counted = 0
        """Tokens at the last sample."""
        self._ended = 0
        """Tokens of the requests that have ended."""
        self._mean = 0.0
        """Tokens that a running request had generated at the last sample, on average."""
        self._each = 1.0
        """Sequences of a running request at the last sample, on average."""

    def start(self, request: Request, now: float) -> None:
        """Records that a request has its first slot. The tokens of an earlier run are not counted again."""
        self._starts[subjects.class_of(request.work.priority)].add(1, now)
        self._counted += request.num_generated

    def end(self, request: Request) -> None:
        """Records that a request has ended."""
        if not request.queued:
            self._ended += request.num_generated
            if self._rate is not None:
                self._rate.end(request.num_generated)

    def sample(self, policy: Policy | None, requests: Iterable[Request], now: float) -> None:
        """Records the tokens generated since the last sample. Without a policy nothing runs."""
        # A request that has ended is kept until its detokenizer has read its last token, and was counted when it ended.
        started = [request for request in requests if not request.queued and request.ended_at is None]
        running = sum([request.num_generated for request in started])
        tokens = self._ended + running
        if policy is not None:
            if self._rate is None:
                self._rate = ServiceRate(policy.limits.max_running)
            generated = max(0, tokens - self._counted)  # requests that were handed back are no longer counted
            seconds = now - self._sampled_at
            self._rate.observe(seconds, len(policy.running), generated, waiting=len(policy.waiting) > 0)
        self._mean = running / len(started) if started else 0.0
        if started:
            self._each = sum(request.num_choices for request in started) / len(started)
        self._counted, self._sampled_at = tokens, now

    def rate(self) -> float:
        """Returns how many requests can start per second while all slots are in use; 0: unknown."""
        return self._rate.starts_per_second(self._mean) if self._rate is not None else 0.0

    def free(self, policy: Policy) -> float:
        """Returns how many more requests could run now."""
        most = self._rate.concurrency if self._rate is not None else policy.limits.max_running
        return max(0.0, most - len(policy.running)) / self._each

    def delay(self) -> float:
        """Returns the seconds by which requests start later than at the rate, because those that run are young."""
        rate = self.rate()
        if self._rate is None or not rate:
            return 0.0
        return self._rate.youth(self._mean) * self._rate.concurrency / self._each / rate

    def starts(self, now: float) -> tuple[float, ...]:
        """Returns how many requests of each class have started per second lately."""
        return tuple(starts.at(now) for starts in self._starts)
