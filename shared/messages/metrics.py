"""Every service to the gateway: the values of its metrics."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.metrics.metric import Sample


class MetricsReport(Wire, frozen=True):
    """What one process has counted since its start."""

    service: str
    """tokenizer, scheduler, executor, detokenizer or gateway."""
    instance: str
    """Random id of the process."""
    model: str
    """Name of the served model."""
    started: float
    """When the process began to count, Unix time in seconds."""
    samples: list[Sample]
