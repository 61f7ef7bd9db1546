"""Plans on their way from the event loop to the step thread."""

import threading
from typing import NamedTuple

from pagewire.shared.messages.plan import Plan

ASIDE = 256
"""Plans that may wait for a missing one. The scheduler sends again whatever is dropped."""


class Arrived(NamedTuple):
    """What came since the thread last asked."""

    term: int
    """The term in force. All plans are of it."""
    plans: list[Plan]
    """In order of their numbers, without a gap."""


class PlanInbox:
    """Hands plans over in order of number and never across a gap. A higher term begins anew.

    `begin`, `put` and `close` return at once and belong to the event loop; `take` belongs to the thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._term = 0
        self._last = 0
        self._ready: list[Plan] = []
        self._aside: dict[int, Plan] = {}
        self._news = False
        self._closed = False

    @property
    def term(self) -> int:
        """The term in force; 0 before the first."""
        return self._term

    @property
    def last(self) -> int:
        """Number of the last plan that can be applied: what comes behind a gap does not count."""
        return self._last

    def begin(self, term: int) -> None:
        """A term begins. Plans of another one are dropped from now on."""
        with self._changed:
            self._term, self._last = term, 0
            self._ready.clear()
            self._aside.clear()
            self._notify()

    def put(self, plan: Plan) -> None:
        """Takes in a plan. One of another term, or one that came before, is dropped."""
        with self._changed:
            if plan.term != self._term or plan.number <= self._last:
                return
            if plan.number > self._last + 1:
                if len(self._aside) < ASIDE:
                    self._aside[plan.number] = plan
                return
            following: Plan | None = plan
            while following is not None:
                self._ready.append(following)
                self._last = following.number
                following = self._aside.pop(self._last + 1, None)
            self._notify()

    def close(self) -> None:
        """Ends the thread at its next `take`."""
        with self._changed:
            self._closed = True
            self._notify()

    def take(self, *, wait: bool) -> Arrived | None:
        """What has come; with `wait`, blocks until something has. None once closed."""
        with self._changed:
            while wait and not self._news:
                self._changed.wait()
            if self._closed:
                return None
            arrived = Arrived(self._term, self._ready)
            self._ready, self._news = [], False
            return arrived

    def _notify(self) -> None:
        self._news = True
        self._changed.notify()
