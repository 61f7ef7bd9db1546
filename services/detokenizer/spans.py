"""The span of a stream, by OpenTelemetry's conventions for generative AI."""

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from pagewire.services.detokenizer.state.stream import Stream
from pagewire.shared.telemetry import tracing


def end_span(span: Span, stream: Stream) -> None:
    """Adds the outcome of a stream to its span, and ends the span."""
    if span.is_recording():
        attributes: dict[str, AttributeValue] = {
            "request_id": stream.request_id,
            "gen_ai.provider.name": tracing.PROVIDER,
            "gen_ai.response.id": stream.public_id,
            "gen_ai.response.finish_reasons": [completion.finish or "error" for completion in stream.completions],
            "gen_ai.usage.input_tokens": stream.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
            "gen_ai.usage.output_tokens": stream.tokens,
            "pagewire.stop_reasons": [str(completion.stop_reason or "") for completion in stream.completions],
            "pagewire.adopted": stream.adopted,
        }
        if stream.drafts.drafted:
            attributes["pagewire.drafted_tokens"] = stream.drafts.drafted
            attributes["pagewire.accepted_tokens"] = stream.drafts.accepted
        if stream.first_token_at:
            attributes["gen_ai.response.time_to_first_chunk"] = stream.first_token_at - stream.opened_at
        span.set_attributes(attributes)
        if stream.error is not None:
            tracing.fail(span, stream.error)
    span.end()
