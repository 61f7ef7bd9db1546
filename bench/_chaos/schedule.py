"""The faults of a run: which, when and for how long, all from a seed."""

import random
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagewire.bench._chaos.false_clock import COMPILER
from pagewire.embedded.programs import GATEWAY, PIPELINE
from pagewire.embedded.stack import BROKER

SERVICES = (*PIPELINE, GATEWAY)
KILL, STOP, TERMINATE, CUT, FULL = "kill", "stop", "term", "cut", "full"
STARVE, BUSY, SKEW = "starve", "busy", "skew"
DELETE, PURGE, EDIT, PAUSE = "delete", "purge", "edit", "pause"
DAMAGE, JOIN = "damage", "join"
STORE, MACHINE, CLOCKS, VERSION = "store", "machine", "clocks", "version"
"""Targets that are no process: the work stream, all cores, the clocks of all services, and services of another wire
version."""
RANK = "rank"
"""A process of an executor that has several, but not the one that supervises the others."""
KINDS = (
    *(f"{action}:{target}" for action in (KILL, STOP, TERMINATE) for target in (*SERVICES, BROKER)),
    *(f"{CUT}:{service}" for service in SERVICES),
    f"{FULL}:{BROKER}",
    *(f"{STARVE}:{target}" for target in (*SERVICES, BROKER)),
    f"{BUSY}:{MACHINE}",
    f"{SKEW}:{CLOCKS}",
    *(f"{action}:{STORE}" for action in (DELETE, PURGE, EDIT, PAUSE)),
    *(f"{action}:{RANK}" for action in (KILL, STOP)),
    f"{DAMAGE}:{BROKER}",
    f"{JOIN}:{VERSION}",
)
"""SIGKILL, SIGSTOP and later SIGCONT, SIGTERM, a lost network, a full store, a twentieth of a core, 16 busy processes,
clocks that differ from the broker's, what somebody with all rights does to the work stream by hand, SIGKILL of the
broker with the loss of a part of its disk, and services of another wire version that join and leave."""
DEFAULT = tuple(kind for kind in KINDS if COMPILER or not kind.startswith(SKEW))
"""The kinds that this machine can do."""
SHORT, LONG = (0.3, 1.5), (2.5, 4.5)
"""Seconds for which a service is frozen or cut off: within the silence after which it counts as gone, and beyond."""
FILLED = (0.5, 3.0)
"""Seconds for which the store is full."""
STARVED = (3.0, 8.0)
"""Seconds without cores, with wrong clocks, or beside services of another version: beyond the silence after which a
service counts as gone."""
REST = (0.1, 0.8)
"""Seconds between the recovery of the stack and the next fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the moment at which it happens."""

    kind: str
    """One of `KINDS`."""
    rest: float = 0.0
    """Seconds to wait before it."""
    seconds: float = 0.0
    """Seconds that the fault lasts, where it does not end by itself."""
    replica: int = 0
    """Which replica it hits, modulo their number."""

    @property
    def action(self) -> str:
        """The action of the fault: the first part of its kind."""
        return self.kind.partition(":")[0]

    @property
    def target(self) -> str:
        """Victim of the fault: a service, a rank, the broker, the store or the machine."""
        return self.kind.partition(":")[2]


def select(text: str) -> tuple[str, ...]:
    """Returns the kinds that a list such as `kill:detokenizer,stop` names; `stop` stands for all kinds of that action.

    Raises:
        ArgumentTypeError: there is no such kind.
    """
    named = [name.strip() for name in text.split(",")]
    actions = {kind.partition(":")[0] for kind in KINDS}
    for name in named:
        if name not in KINDS and name not in actions:
            raise ArgumentTypeError(f"there is no fault {name}: choose from {', '.join(KINDS)}")
        if name.partition(":")[0] == SKEW and not COMPILER:
            raise ArgumentTypeError(f"{SKEW} needs a C compiler: install one, as `cc`")
    return tuple(kind for kind in KINDS if kind in named or kind.partition(":")[0] in named)


def possible(kinds: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Returns the kinds that can happen to executors of so many ranks.

    >>> possible(("kill:executor", "kill:rank"), ranks=1)
    ('kill:executor',)
    """
    return tuple(kind for kind in kinds if ranks > 1 or not kind.endswith(f":{RANK}"))


def schedule(seed: int, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Yields faults without end. Every kind comes once before any comes again; their order is random."""
    rng = random.Random(f"faults {seed}")
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            action = kind.partition(":")[0]
            lasts = {FULL: FILLED, STARVE: STARVED, BUSY: STARVED, SKEW: STARVED, JOIN: STARVED}.get(
                action
            ) or rng.choice((SHORT, LONG))
            seconds = rng.uniform(*lasts) if action in {STOP, CUT, FULL, STARVE, BUSY, SKEW, JOIN} else 0.0
            yield Fault(kind, rng.uniform(*REST), seconds, rng.randrange(1 << 16))
