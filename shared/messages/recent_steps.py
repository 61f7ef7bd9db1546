"""Executor to gateway: figures of the latest steps, for the console."""

from typing import NamedTuple

from pagewire.shared.messages.codec import Wire

LATEST_STEPS = 64
"""Steps whose figures an executor keeps."""


class StepFigures(NamedTuple):
    """The size and the time of one step."""

    number: int
    """Number of the step since the start of the executor."""
    rows: int
    """Rows of the step."""
    prompt_tokens: int
    """Positions of rows that compute more than one, as a prompt does."""
    decode_tokens: int
    """Positions of the other rows."""
    elapsed_us: int
    """Time of the step on the device, in microseconds."""
    lease_left: int
    """Steps that the executor might still have run without another plan."""


class RecentSteps(Wire, frozen=True):
    """Answer to a request at `pagewire.svc.recent_steps`."""

    executor: str
    """Instance id of the executor."""
    steps: tuple[StepFigures, ...]
    """The latest steps, oldest first."""
