"""What the span of a request says of its parameters, by OpenTelemetry's conventions for generative AI."""

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from pagewire.shared import telemetry
from pagewire.shared.messages.client import GenerateRequest


def describe(span: Span, request: GenerateRequest, model: str) -> None:
    """Adds model and parameters to a span; nothing while the request is not traced. `model` is the served name."""
    if not span.is_recording():
        return
    sampling = request.sampling
    given: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "text_completion" if request.messages is None else "chat",
        "gen_ai.provider.name": telemetry.PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "pagewire.request.priority": request.priority,
    }
    span.set_attributes({name: value for name, value in given.items() if value is not None})
