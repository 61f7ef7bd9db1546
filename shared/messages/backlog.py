"""Scheduler to tokenizers and other schedulers: how many requests wait, and how fast they start."""

from pagewire.shared.messages.codec import Wire


class Backlog(Wire, frozen=True):
    """Sent twice a second by every scheduler. Tuples have one entry per class, as `subjects.CLASSES` orders them."""

    scheduler: str
    """Instance id of the scheduler."""
    started: tuple[int, ...]
    """Unfinished requests of this scheduler that have had a slot."""
    starts: tuple[float, ...]
    """Requests per second that have started at this scheduler lately."""
    rate: float
    """Requests that this replica can start per second while all slots are in use; 0: unknown."""
    free: float
    """Requests that this replica could start at once."""
    stored: tuple[int, ...] = ()
    """Unfinished requests in all queues of the model. Only one scheduler counts them: the others leave it empty."""
    last: int = 0
    """Number that the store gave to the last item that `stored` counts."""
    delay: float = 0.0
    """Seconds by which requests start later than at `rate`, because the running ones have begun only lately."""
    held: tuple[int, ...] = ()
    """Unfinished requests of this scheduler."""
