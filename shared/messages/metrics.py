"""Every service to the gateway: the values of its metrics."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.metrics.metric import Sample


class MetricsReport(Wire, frozen=True):
    """The metrics of one process since its start."""

    service: str
    """Name of the service: tokenizer, scheduler, executor, detokenizer or gateway."""
    instance: str
    """Random id of the process."""
    model: str
    """Name of the served model."""
    started: float
    """When the process began to count, Unix time in seconds."""
    samples: list[Sample]
