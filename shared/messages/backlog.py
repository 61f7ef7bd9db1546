"""Scheduler to tokenizers and other schedulers: what waits, and how fast it starts."""

from pagewire.shared.messages.codec import Wire


class Backlog(Wire, frozen=True):
    """Sent twice a second by every scheduler. Tuples have one entry per class, as `subjects.CLASSES` orders them."""

    scheduler: str
    """Instance id of the scheduler."""
    started: tuple[int, ...]
    """Requests here that have had a slot and have not ended."""
    starts: tuple[float, ...]
    """Requests that have started here per second lately."""
    rate: float
    """Requests that this replica can start per second while all slots are in use; 0: unknown."""
    free: float
    """Requests that could start here at once."""
    stored: tuple[int, ...] = ()
    """Unfinished requests in all queues of the model. Only one scheduler counts them; from the others it is empty."""
    last: int = 0
    """Number that the store gave to the last item that `stored` counts."""
    delay: float = 0.0
    """Seconds by which requests start later than at `rate`, because those that run have begun only lately."""
    held: tuple[int, ...] = ()
    """Requests here that have not ended."""
