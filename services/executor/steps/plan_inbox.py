"""The queue of plans from the event loop to the step thread."""

import threading
from typing import NamedTuple

from pagewire.shared.messages.plan import Plan

MAX_OUT_OF_ORDER = 256
"""Plans that may wait for a missing one. The scheduler sends dropped plans again."""


class NewPlans(NamedTuple):
    """The plans that arrived since the last `take`."""

    term: int
    """The current term. All plans belong to it."""
    plans: list[Plan]
    """Plans in order of their numbers, without a gap."""


class PlanInbox:
    """Passes plans to the step thread in order of their numbers, without gaps. Numbering restarts with each term.

    The event loop calls `begin`, `put` and `close`, which return at once; the step thread calls `take`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._term = 0
        self._last = 0
        self._ready: list[Plan] = []
        self._out_of_order: dict[int, Plan] = {}
        self._news = False
        self._closed = False

    @property
    def term(self) -> int:
        """The current term; 0 before the first one."""
        return self._term

    @property
    def last(self) -> int:
        """Number of the last plan received without a gap."""
        return self._last

    def begin(self, term: int) -> None:
        """Starts a term: drops the plans of the previous one, and from now on accepts only those of this term."""
        with self._changed:
            self._term, self._last = term, 0
            self._ready.clear()
            self._out_of_order.clear()
            self._notify()

    def put(self, plan: Plan) -> None:
        """Adds a plan. Ignores a plan of another term and one that was received before."""
        with self._changed:
            if plan.term != self._term or plan.number <= self._last:
                return
            if plan.number > self._last + 1:
                if len(self._out_of_order) < MAX_OUT_OF_ORDER:
                    self._out_of_order[plan.number] = plan
                return
            following: Plan | None = plan
            while following is not None:
                self._ready.append(following)
                self._last = following.number
                following = self._out_of_order.pop(self._last + 1, None)
            self._notify()

    def wake(self) -> None:
        """Makes the next `take` return although there may be no plan. Any thread may call it."""
        with self._changed:
            self._notify()

    def close(self) -> None:
        """Makes the next `take` return None, so that the thread ends."""
        with self._changed:
            self._closed = True
            self._notify()

    def take(self, *, wait: bool) -> NewPlans | None:
        """Returns the plans that arrived; None once closed. With `wait`, blocks until there is a plan, a new
        term, or `wake` is called."""
        with self._changed:
            while wait and not self._news:
                self._changed.wait()
            if self._closed:
                return None
            new = NewPlans(self._term, self._ready)
            self._ready, self._news = [], False
            return new

    def _notify(self) -> None:
        self._news = True
        self._changed.notify()
