"""How far the detokenizers have read the steps: the executor's credit depends on the slowest of them."""

from collections.abc import Callable

from pagewire.shared.bus import Bus
from pagewire.shared.process.peers import Peers


class Readers:
    """The detokenizers that read the steps of a term, by their heartbeats."""

    def __init__(self, bus: Bus, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each heartbeat and end of a reader, since the slowest one may be another."""
        self._peers = Peers(bus, on_change)

    async def listen(self) -> None:
        """Subscribes to the detokenizers' heartbeats."""
        await self._peers.listen("detokenizer")

    def slowest(self, term: int) -> int | None:
        """Returns the last step read by the slowest live reader of `term`; None while nobody reads the term.

        A silent reader is ignored: when it is back, it catches up from the tokens that the scheduler knows.
        """
        alive = self._peers.alive("detokenizer")
        return min((beat.reads[term] for beat in alive if term in beat.reads), default=None)
