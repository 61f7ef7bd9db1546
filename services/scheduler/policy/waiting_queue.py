"""Chooses who gets the next slot: by priorities that age, fair shares of users, and order of arrival. Pure.

Ageing is linear: a request counts as `AGEING` seconds younger for each step of priority, so it goes before every
request of the next better priority that came `AGEING` seconds after it or later. This order never changes while
requests wait, and running sequences keep their blocks in the same order.

Within one priority the user who has been served the fewest tokens goes first, as in the virtual token counter of Sheng
et al., Fairness in Serving Large Language Models (2024). A user who comes back from a pause starts with the count of
the last user served, so a pause earns no credit, and a thousand requests of one user delay another user by one request.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pagewire.services.scheduler.policy.sequence import Sequence

AGEING = 10.0
"""Seconds of waiting that make up for one step of priority."""
_USERS_KEPT = 4096
"""Users whose count is kept before those without a claim to it are forgotten."""


def rank(sequence: Sequence) -> tuple[float, int]:
    """Returns a sort key. The sequence with the smaller key is older: it goes first and keeps its blocks longer."""
    return sequence.arrival_time + AGEING * sequence.priority, sequence.arrival_order


class WaitingQueue:
    """The sequences that wait for a slot, and how many tokens each user has been served.

    Attributes:
        front: sequences that go before all others, by rank: their requests have begun.

    >>> from pagewire.shared.messages.work import Sampling
    >>> queue = WaitingQueue()
    >>> for i, user in enumerate(("ann", "ann", "bob")):
    ...     queue.add(Sequence(i, [0] * 8, 8, Sampling(16), arrival_order=i, user=user))
    >>> [sequence.id for sequence in queue.in_order()]  # ann's second request comes behind bob's first
    [0, 2, 1]
    """

    def __init__(self) -> None:
        self.front: list[Sequence] = []
        self._waiting: list[Sequence] = []  # by rank
        self._users: Counter[str] = Counter()  # sequences that wait, without those at the front
        self._served: dict[str, int] = {}
        self._level = 0  # tokens that the user whose sequence was popped last had been served

    def __len__(self) -> int:
        return len(self.front) + len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the front by rank, then the others by rank."""
        yield from self.front
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence behind the front."""
        user = sequence.user
        if user not in self._users:
            self._served[user] = max(self._served.get(user, 0), self._level)
        self._users[user] += 1
        insort(self._waiting, sequence, key=rank)

    def prepend(self, sequence: Sequence) -> None:
        """Adds a sequence to the front."""
        insort(self.front, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that gets no slot."""
        if sequence in self.front:
            self.front.remove(sequence)
            return
        place = bisect_left(self._waiting, rank(sequence), key=rank)
        while self._waiting[place] is not sequence:  # choices of one request have the same rank
            place += 1
        del self._waiting[place]
        self._users[sequence.user] -= 1
        if not self._users[sequence.user]:
            del self._users[sequence.user]

    def pop(self, sequence: Sequence) -> None:
        """Removes a sequence that gets a slot."""
        behind = sequence not in self.front
        self.remove(sequence)
        if not behind:
            return
        self._level = max(self._level, self._served.get(sequence.user, 0))
        if len(self._served) > _USERS_KEPT:
            self._served = {u: n for u, n in self._served.items() if n > self._level or u in self._users}

    def charge(self, user: str, tokens: int) -> None:
        """Adds `tokens` to the tokens that the user has been served."""
        self._served[user] = self._served.get(user, self._level) + tokens

    def in_order(self) -> Iterator[Sequence]:
        """Yields the sequences behind the front in the order in which they should get slots.

        The priority of the oldest sequence is next, and within it the user who has been served least, with each
        sequence charged as if those before it had their slots. Removals during the iteration do not change the order.
        """
        if len(self._users) == 1:
            yield from list(self._waiting)  # one user shares with nobody: by rank
            return
        by_priority: dict[int, list[Sequence]] = defaultdict(list)
        by_user: dict[tuple[int, str], list[Sequence]] = defaultdict(list)
        for sequence in reversed(self._waiting):
            by_priority[sequence.priority].append(sequence)
            by_user[sequence.priority, sequence.user].append(sequence)
        users: dict[int, list[tuple[int, tuple[float, int], str]]] = defaultdict(list)
        for (priority, user), own in by_user.items():
            users[priority].append((self._served[user], rank(own[-1]), user))
        for heap in users.values():
            heapify(heap)
        yielded: set[int] = set()
        while by_priority:
            priority = min(by_priority, key=lambda p: rank(by_priority[p][-1]))
            served, _, user = heappop(users[priority])
            own = by_user[priority, user]
            sequence = own.pop()
            yielded.add(sequence.id)
            yield sequence
            if own:
                served += len(sequence.tokens)
                heappush(users[priority], (served, rank(own[-1]), user))
            while by_priority[priority] and by_priority[priority][-1].id in yielded:
                by_priority[priority].pop()
            if not by_priority[priority]:
                del by_priority[priority]
