"""Measures several cases in turn, round by round, so that each can be compared with the first one of its round."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.bench._common.output import spread
from pagewire.shared.progress import shown


@dataclass
class Cell:
    """The rates of one server with a number of clients."""

    model: str
    server: str
    clients: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second of each round, by case."""

    def ratio(self, case: str) -> str:
        """Returns the median and the range of a case's rates, relative to those of the first case in the same round.

        >>> Cell("m", "pagewire", 1, {"plain": [10.0, 20.0], "other": [9.0, 16.0]}).ratio("other")
        '0.85 (0.80–0.90)'
        """
        plain = next(iter(self.rates.values()))
        ratios = [rate / first for rate, first in zip(self.rates[case], plain, strict=True)]
        return spread(statistics.median(ratios), ratios)


def measure(cells: Sequence[Cell], cases: Mapping[str, Callable[[int], float]], rounds: int) -> None:
    """Adds `rounds` rates of each case to each cell: a case returns its tokens per second with a number of clients.

    Who goes first alternates.
    """
    for cell in cells:
        cell.rates = {name: [] for name in cases}
    turns = [(number, cell) for number in range(rounds) for cell in cells]
    for number, cell in shown(turns, cells[0].server):
        for name, rate in list(cases.items())[:: -1 if number % 2 else 1]:
            cell.rates[name].append(rate(cell.clients))
