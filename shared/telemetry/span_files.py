"""Writes spans to files, one JSON object per line and one file per process, and reads them for `pagewire trace`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id
from typing_extensions import override

from pagewire.shared import subjects
from pagewire.shared.errors import ConfigurationError


class Span(msgspec.Struct, omit_defaults=True):
    """A finished span, as it is stored."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    start: float
    """Unix seconds."""
    end: float
    """Unix seconds."""
    parent_id: str = ""
    attributes: dict[str, str | bool | int | float | list[str | bool | int | float]] = {}
    """Attributes set by the service, such as `request_id`."""


MAX_WAITING = 16384
"""Maximum number of spans that wait for an exporter; one more replaces the oldest."""

_PREFIX = re.compile(r"^(cmpl|chatcmpl|msg|resp)(\\-|_)")
"""The prefix of a request's id in HTTP answers, escaped."""
_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = msgspec.json.Decoder(Span)


class SpanFile(SpanExporter):
    """Appends finished spans to `<folder>/<service>-<instance>.jsonl`."""

    def __init__(self, folder: str, service: str, instance: str) -> None:
        """Creates the file. Raises ConfigurationError if that is not possible."""
        self._service, self._instance = service, instance
        self._path = Path(folder, f"{service}-{instance}.jsonl")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("ab").close()
        except OSError as error:
            raise ConfigurationError(f"trace-dir {folder} cannot be written to: {error.strerror}") from error

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes a batch of spans; called on the exporter's own thread."""
        with self._path.open("ab") as file:
            file.writelines(_encoder.encode(self._row(span)) + b"\n" for span in spans)
        return SpanExportResult.SUCCESS

    def _row(self, span: ReadableSpan) -> Span:
        context = span.context
        return Span(
            name=span.name,
            service=self._service,
            instance=self._instance,
            trace_id=format_trace_id(context.trace_id),
            span_id=format_span_id(context.span_id),
            start=(span.start_time or 0) / 1e9,
            end=(span.end_time or 0) / 1e9,
            parent_id=format_span_id(span.parent.span_id) if span.parent is not None else "",
            attributes={name: _plain(value) for name, value in (span.attributes or {}).items()},
        )


class CountedSpans(BatchSpanProcessor):
    """Hands spans to an exporter in batches, and counts the lost ones."""

    def __init__(self, exporter: SpanExporter, schedule_delay_millis: float | None = None) -> None:
        self._ended = 0
        self._overflowed = 0
        self._counting = _CountingExporter(exporter)
        super().__init__(self._counting, max_queue_size=MAX_WAITING, schedule_delay_millis=schedule_delay_millis)

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled:
            self._ended += 1
            if self._ended - self._counting.taken - self._overflowed > MAX_WAITING:
                self._overflowed += 1
        super().on_end(span)

    def dropped(self) -> int:
        """Returns how many spans the exporter has refused, or the queue had no room for."""
        return self._counting.refused + self._overflowed


class _CountingExporter(SpanExporter):
    """Passes spans on.

    Attributes:
        taken: number of spans that the exporter has taken.
        refused: number of taken spans that have not reached the destination.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = 0
        self.refused = 0

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.refused += len(spans)
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()


def _plain(value: object) -> str | bool | int | float | list[str | bool | int | float]:
    return list(value) if isinstance(value, tuple) else value  # type: ignore[return-value]


def read(folder: Path, latest: int | None = None) -> Iterator[Span]:
    """Yields every span in a folder's files. A line that a crash has cut off is skipped.

    `latest`: bytes that are read at the end of each file; None: all.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            if latest is not None:
                file.seek(max(0, path.stat().st_size - latest))
            lines = file.read().splitlines()
        for line in lines:
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError:
                continue


def of_request(spans: Iterable[Span], request_id: str, tenant: str | None = None) -> list[Span]:
    """Returns the spans of a request and of its trace, ordered by start.

    Args:
        spans: spans of any requests.
        request_id: the id that the client knows: from an HTTP answer, with a prefix, or from the header X-Request-Id,
            to which the gateway adds 8 digits.
        tenant: owner of the request; None: the requests of all tenants are searched.
    """
    spans = list(spans)
    ids = ((span, *subjects.owner_and_text(str(span.attributes.get("request_id")))) for span in spans)
    pattern = re.compile(rf"{_PREFIX.sub('', re.escape(request_id))}(-[0-9a-f]{{8}})?")
    traces = {span.trace_id for span, owner, name in ids if pattern.fullmatch(name) and tenant in {None, owner}}
    return sorted((span for span in spans if span.trace_id in traces), key=lambda span: (span.start, span.end))
