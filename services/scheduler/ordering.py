"""Who gets the next slot: priorities that age, users in fair shares, and order of arrival. Pure.

Ageing is linear: a request counts as `AGEING` seconds younger for each step of priority, so it goes before every
request of the next better priority that came `AGEING` seconds after it or later. This order never changes while
requests wait, and it is the order in which running ones keep their blocks.

Within one priority the turn goes to the user who has been served the fewest tokens, as in the virtual token counter
of Sheng et al., Fairness in Serving Large Language Models (2024): whoever comes back from a pause starts with the
count of the last user served, so nobody saves up turns, and a thousand requests of one user delay another by one.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pagewire.services.scheduler.sequence import Sequence

AGEING = 10.0
"""Seconds of waiting that make up for one step of priority."""
_USERS_KEPT = 4096
"""Users whose count is kept before those without a claim to it are forgotten."""


def rank(sequence: Sequence) -> tuple[float, int]:
    """The smaller one is the older one: it goes first, and keeps its blocks longer."""
    return sequence.arrived + AGEING * sequence.priority, sequence.arrival


class Line:
    """The sequences that wait for a slot, and what each user has been served."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []  # by rank
        self._users: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._level = 0  # what the last user whose turn it was had been served

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """By rank."""
        return iter(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """It waits from now on."""
        user = sequence.user
        if user not in self._users:
            self._served[user] = max(self._served.get(user, 0), self._level)
        self._users[user] += 1
        insort(self._waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        place = bisect_left(self._waiting, rank(sequence), key=rank)
        while self._waiting[place] is not sequence:  # choices of one request have the same rank
            place += 1
        del self._waiting[place]
        self._users[sequence.user] -= 1
        if not self._users[sequence.user]:
            del self._users[sequence.user]

    def begin(self, sequence: Sequence) -> None:
        """Its turn has come."""
        self.remove(sequence)
        self._level = max(self._level, self._served.get(sequence.user, 0))
        if len(self._served) > _USERS_KEPT:
            self._served = {u: n for u, n in self._served.items() if n > self._level or u in self._users}

    def charge(self, user: str, tokens: int) -> None:
        """The user has been served `tokens` more."""
        self._served[user] = self._served.get(user, self._level) + tokens

    def turns(self) -> Iterator[Sequence]:
        """All that wait, in the order in which they should begin, each charged as if the ones before it had begun.

        The priority of the oldest is next, and within it the user who has been served least. What is begun or removed
        meanwhile changes nothing of the order.
        """
        if len(self._users) == 1:
            yield from list(self._waiting)  # nobody to share with: by rank
            return
        ages: dict[int, list[Sequence]] = defaultdict(list)
        flows: dict[tuple[int, str], list[Sequence]] = defaultdict(list)
        for sequence in reversed(self._waiting):
            ages[sequence.priority].append(sequence)
            flows[sequence.priority, sequence.user].append(sequence)
        users: dict[int, list[tuple[int, tuple[float, int], str]]] = defaultdict(list)
        for (priority, user), flow in flows.items():
            users[priority].append((self._served[user], rank(flow[-1]), user))
        for heap in users.values():
            heapify(heap)
        had: set[int] = set()
        while ages:
            priority = min(ages, key=lambda p: rank(ages[p][-1]))
            served, _, user = heappop(users[priority])
            flow = flows[priority, user]
            sequence = flow.pop()
            had.add(sequence.id)
            yield sequence
            if flow:
                served += len(sequence.tokens)
                heappush(users[priority], (served, rank(flow[-1]), user))
            while ages[priority] and ages[priority][-1].id in had:
                ages[priority].pop()
            if not ages[priority]:
                del ages[priority]
