"""Finds the detokenizer that has the stream of a request, or the one that adopts it when that is gone or drains."""

import asyncio
from contextlib import suppress

from pagewire.services.scheduler.request import Request
from pagewire.shared.messages.heartbeat import UNSENT, Heartbeat
from pagewire.shared.process.peers import Peers
from pagewire.shared.rendezvous import rank

MAX_BEATS = 256
"""Instances whose last heartbeat is kept."""


class Detokenizers:
    """The detokenizers, by their heartbeats."""

    def __init__(self, peers: Peers) -> None:
        self._changed = asyncio.Event()
        self._peers = peers
        self._beats: dict[str, tuple[Heartbeat, float]] = {}
        """The last heartbeat of each instance, and when it arrived."""
        self._absent: set[str] = set()
        """Instances that were never heard, and of which the broker says that nobody is there."""

    async def listen(self) -> None:
        """Follows the heartbeats of detokenizers."""
        await self._peers.listen("detokenizer", self._changed.set)

    async def wait(self, timeout: float) -> None:
        """Returns after the next heartbeat, or `timeout` seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def choose(self, request: Request) -> str:
        """Returns the detokenizer to attach a request to: the one that has its stream, or the one that adopts it.

        Empty if its owner is gone and no other one is ready.
        """
        owner = request.detokenizer
        if not request.work.opening or not self.must_move(owner):
            return owner
        ranked = rank(request.work.request_id, self._ready())
        return ranked[0] if ranked else ""

    def must_move(self, owner: str) -> bool:
        """Returns whether the streams of a detokenizer are to be adopted by others."""
        beat = self._peers.find(owner)
        if beat is not None:
            return beat.draining and bool(self._ready())
        return owner in self._absent or self._peers.gone(owner)

    def note_absent(self, instance: str) -> None:
        """Records the broker's word that an instance is not there.

        One that was heard lately may only be reconnecting.
        """
        if self._peers.find(instance) is None:
            self._absent.add(instance)

    def has_read(self, instance: str, term: int, step: int) -> bool:
        """Returns whether a detokenizer has read a step of a term, as far as that can be known."""
        beat = self._peers.find(instance)
        return beat is None or beat.reads.get(term, step) >= step

    def steps_sent(self, instance: str, term: int, since: float) -> int | None:
        """Returns the last step of a term of which a detokenizer has sent all frames, None if that is not known.

        Only a heartbeat that came after the monotonic time `since` counts. The broker passes on what a connection sends
        in order: when the heartbeat arrived, the broker had the frames.
        """
        beat, arrived = self._beats.get(instance, (None, 0.0))
        if beat is None or arrived < since or beat.load.get(UNSENT, 1):
            return None
        return beat.reads.get(term)

    def slowest_reader(self, term: int) -> int | None:
        """Returns the last step read by the slowest live reader of `term`; None while nobody reads the term.

        A silent reader is ignored: when it is back, it catches up from the tokens that the scheduler knows.
        """
        alive = self._peers.alive("detokenizer")
        return min((beat.reads[term] for beat in alive if term in beat.reads), default=None)

    def note_beats(self) -> None:
        """Remembers the last heartbeats beyond the end of their senders."""
        for beat in self._peers.alive("detokenizer"):
            self._beats[beat.instance] = beat, self._peers.last(beat.instance)[1]
        while len(self._beats) > MAX_BEATS:
            del self._beats[next(iter(self._beats))]

    def _ready(self) -> list[str]:
        return [beat.instance for beat in self._peers.alive("detokenizer") if beat.ready and not beat.draining]
