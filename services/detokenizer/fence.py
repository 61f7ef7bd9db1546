"""Keeps a detokenizer that was frozen from sending anything: others own its streams by then.

A frozen process looks dead to others, which adopt its streams. When it runs again, it must not send frames that
compete with theirs. So every use of the bus asks the fence first; a closed fence ends the process.
"""

import math
import time
from typing import Any, cast

from pagewire.shared.bus import Bus, Handler, Message, Subscription
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.process.heartbeater import INTERVAL
from pagewire.shared.process.peers import SILENCE

LIMIT = SILENCE - INTERVAL
"""Seconds without a renewal after which others may take this process for dead: they count from its last heartbeat, an
interval earlier."""
RENEW_EVERY = 0.25
"""Seconds between two renewals."""


class Frozen(BusUnavailable):
    """The process stood still for so long that others have adopted its streams."""

    def __init__(self) -> None:
        super().__init__(
            f"the process stood still for more than {LIMIT:g} s: it ends, and others go on with its streams"
        )


class Fence:
    """Knows by the monotonic clock whether this process has ever stood still for `LIMIT` seconds."""

    def __init__(self) -> None:
        """The fence is open until `renew` is called for the first time: nobody waits for a process that starts."""
        self._renewed_at = math.inf
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the process may not send anything any more. A closed fence never opens again."""
        if time.monotonic() - self._renewed_at > LIMIT:
            self._closed = True
        return self._closed

    def check(self) -> None:
        """Raises Frozen if the fence is closed."""
        if self.closed:
            raise Frozen

    def renew(self) -> None:
        """Notes that the process runs, every `RENEW_EVERY` seconds. Raises Frozen if it stood still before."""
        self.check()
        self._renewed_at = time.monotonic()


class _Fenced:
    """A stand-in for an object: reading one of its attributes raises Frozen once the fence is closed."""

    def __init__(self, guarded: Any, fence: Fence, **replaced: Any) -> None:
        """`replaced`: attributes that are given out instead of those of `guarded`."""
        self._guarded = guarded
        self._fence = fence
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        self._fence.check()
        return self._replaced.get(name) or getattr(self._guarded, name)


def fenced(bus: Bus, fence: Fence) -> Bus:
    """Returns `bus` behind a fence: once it is closed, no message is delivered, and each use of the bus or of its store
    raises Frozen."""

    async def subscribe(subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        def guarded(message: Message) -> None:
            if not fence.closed:
                handler(message)

        return await bus.subscribe(subject, guarded, queue=queue)

    return cast("Bus", _Fenced(bus, fence, subscribe=subscribe, store=_Fenced(bus.store, fence)))
