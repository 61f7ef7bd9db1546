"""The span and the log line of a request: its parameters, by OpenTelemetry's conventions for generative AI."""

import structlog
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from pagewire.shared.messages.client import GenerateRequest
from pagewire.shared.sampling_parameters import PARAMETERS
from pagewire.shared.telemetry import tracing


def note(span: Span, **values: str | int) -> None:
    """Adds values to the span of a request, and to the log line of the request that the current task processes."""
    span.set_attributes(values)
    structlog.contextvars.bind_contextvars(**values)


def describe(span: Span, request: GenerateRequest, model: str) -> None:
    """Adds model and parameters to the span of a request, if it is traced. `model` is the served name."""
    if not span.is_recording():
        return
    sampling = request.sampling
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "text_completion" if request.messages is None else "chat",
        "gen_ai.provider.name": tracing.PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        **{f"gen_ai.request.{each.name}": getattr(sampling, each.name) for each in PARAMETERS},
        "gen_ai.request.seed": sampling.seed,
        "pagewire.request.priority": request.priority,
    }
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
