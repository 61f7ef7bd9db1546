"""Counters and histograms of a detokenizer's streams."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from pagewire.services.detokenizer.state.stream import Stream
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram, Sample


class StreamMetrics:
    """Latencies and sizes of requests. Latencies of an adopted stream are left out, because its beginning is unknown.

    Attributes:
        tokens: tokens received so far.
        adopted: streams adopted so far.
        not_finite: requests so far whose logits were NaN or infinite.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.adopted = 0
        self.not_finite = 0
        self._finishes: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._first_token = Histogram(table.FIRST_TOKEN)
        self._inter_token = Histogram(table.INTER_TOKEN)
        self._per_token = Histogram(table.TIME_PER_TOKEN)
        self._duration = Histogram(table.DURATION)
        self._prompt_sizes = Histogram(table.REQUEST_PROMPT)
        self._generated_sizes = Histogram(table.REQUEST_GENERATED)

    def on_first_token(self, stream: Stream, now: float) -> None:
        """Counts the first token of a request, read at the monotonic time `now`."""
        if not stream.first_token_at:
            stream.first_token_at = now
            if not stream.adopted:
                self._first_token.observe(now - stream.opened_at)

    def on_tokens(self, before: Mapping[float, int], now: float) -> None:
        """Counts rows with a token that is read `now`, by the time at which their token before it was read."""
        for at, rows in before.items():
            self._inter_token.observe(now - at, rows)

    def on_end(self, stream: Stream) -> None:
        """Counts a request that has ended."""
        outcome = stream.error.kind if stream.error is not None else stream.completions[0].finish
        self._finishes[outcome or ""] += 1
        self._prompt_tokens += stream.prompt_tokens
        self._cached_tokens += stream.cached_tokens
        self._prompt_sizes.observe(stream.prompt_tokens)
        self._generated_sizes.observe(stream.tokens)
        if stream.adopted:
            return
        self._duration.observe(time.monotonic() - stream.opened_at)
        for choice in stream.choices:
            if len(choice.tokens) > 1 and stream.first_token_at:
                self._per_token.observe((choice.token_at - stream.first_token_at) / (len(choice.tokens) - 1))

    def samples(self) -> Iterator[Sample]:
        """Yields all figures."""
        yield from table.REQUESTS.samples(self._finishes.items())
        yield table.NOT_FINITE.sample(self.not_finite)
        yield table.RECOVERIES.sample(self.adopted, "stream")
        yield table.PROMPT_TOKENS.sample(self._prompt_tokens)
        yield table.CACHED_TOKENS.sample(self._cached_tokens)
        yield table.GENERATED_TOKENS.sample(self.tokens)
        yield table.FIRST_TOKEN.sample(self._first_token)
        yield table.INTER_TOKEN.sample(self._inter_token)
        yield table.TIME_PER_TOKEN.sample(self._per_token)
        yield table.DURATION.sample(self._duration)
        yield table.REQUEST_PROMPT.sample(self._prompt_sizes)
        yield table.REQUEST_GENERATED.sample(self._generated_sizes)
