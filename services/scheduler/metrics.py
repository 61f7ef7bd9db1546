"""The figures of this scheduler, over all its terms."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import structlog

from pagewire.services.scheduler.policy.sequence import SequenceState
from pagewire.services.scheduler.request import Request, Stage
from pagewire.services.scheduler.spans import enter
from pagewire.services.scheduler.term import COUNTED, Term
from pagewire.shared import subjects
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram, Metric, Sample
from pagewire.shared.telemetry import tracing

_log = structlog.get_logger()


class RequestMetrics:
    """Times of requests, and counts of all terms."""

    def __init__(self) -> None:
        self._redelivered = 0
        """Requests that got their first slot here after an earlier delivery."""
        self._executors_lost = 0
        """Executors that were lost with what they ran."""
        self._ended_terms: Counter[Metric] = Counter(dict.fromkeys(COUNTED, 0))
        self._queue = Histogram(table.QUEUE_TIME)
        self._prefill = Histogram(table.PREFILL_TIME)
        self._decode = Histogram(table.DECODE_TIME)
        self._inference = Histogram(table.INFERENCE_TIME)

    def on_slot(self, request: Request, now: float) -> None:
        """Counts the first slot of a request. `now` is the broker's time."""
        self._redelivered += request.generation > 1
        request.queue_time = max(0.0, now - request.stored_at)
        self._queue.observe(request.queue_time)
        request.slot_at = time.monotonic()

    def on_first_token(self, request: Request) -> None:
        """Counts the first token of a request; later calls for the same request do nothing."""
        if request.slot_at and not request.first_token_at:
            request.first_token_at = time.monotonic()
            self._prefill.observe(request.first_token_at - request.slot_at)

    def on_end(self, request: Request) -> None:
        """Counts a request that has ended, and writes its log line."""
        now, slot, first = time.monotonic(), request.slot_at, request.first_token_at
        if first:
            self._decode.observe(now - first)
            self._inference.observe(now - slot)
        enter(request, Stage.ENDED, end="finished", tokens=request.num_generated)
        _log.info(
            "request_scheduled",
            request_id=request.work.request_id,
            trace_id=tracing.trace_id(request.trace),
            deliveries=request.generation,
            queue_ms=round(request.queue_time * 1000, 1),
            prefill_ms=round((first - slot) * 1000, 1) if first else None,
            decode_ms=round((now - first) * 1000, 1) if first else None,
        )

    def on_executor_lost(self) -> None:
        """Counts an executor that was lost with what it ran."""
        self._executors_lost += 1

    def on_term_end(self, term: Term) -> None:
        """Keeps the counts of a term that has ended."""
        self._ended_terms.update(term.counts())

    def samples(self, term: Term | None) -> Iterator[Sample]:
        """Yields all figures; `term` is the present one."""
        yield table.QUEUE_TIME.sample(self._queue)
        yield table.PREFILL_TIME.sample(self._prefill)
        yield table.DECODE_TIME.sample(self._decode)
        yield table.INFERENCE_TIME.sample(self._inference)
        yield table.RECOVERIES.sample(self._redelivered, "request")
        yield table.RECOVERIES.sample(self._executors_lost, "executor")
        counts = Counter(self._ended_terms)
        if term is not None:
            counts.update(term.counts())
            policy, pool = term.policy, term.policy.pool
            if term.ready:
                yield table.PAIR.sample(1.0, term.executor.name)
            yield table.CACHE_INFO.sample(1.0, str(policy.limits.block_size), str(pool.num_blocks))
            yield table.BLOCKS.sample(pool.num_blocks)
            yield table.BLOCKS_USED.sample(pool.num_used)
            yield table.KV_USAGE.sample(pool.num_used / pool.num_blocks)
            yield table.BUDGET.sample(policy.step_tokens)
        for metric, count in counts.items():
            yield metric.sample(count)


def request_samples(requests: Iterable[Request], queued: tuple[int, ...]) -> Iterator[Sample]:
    """Yields how many requests run and wait.

    `queued` is their number in the store, by class; empty: another scheduler counts them.
    """
    running: Counter[str] = Counter(dict.fromkeys(subjects.CLASSES, 0))
    waiting = Counter({(name, reason): 0 for name in subjects.CLASSES for reason in ("capacity", "preempted")})
    for request in requests:
        name = subjects.CLASSES[subjects.class_of(request.work.priority)]
        if request.queued:
            waiting[name, "capacity"] += 1
        elif request.work.sampling.beam_width or any(s.state is SequenceState.RUNNING for s in request.sequences):
            running[name] += 1
        elif request.unfinished:
            waiting[name, "preempted"] += 1
    waiting.update({(name, "queued"): count for name, count in zip(subjects.CLASSES, queued, strict=False)})
    yield from table.RUNNING.samples(running.items())
    for labels, count in waiting.items():
        yield table.WAITING.sample(count, *labels)
