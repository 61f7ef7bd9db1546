"""Measures the CPU time of each service per token, in iterations of a yardstick that does the same kind of work.

Each service runs alone in this process, with 256 sequences on the in-memory bus; the executor's device takes no time.
Per unit, the columns give CPU microseconds, iterations of the yardstick (cost), the cost recorded in `bench/cost.py`,
and the ratio of the two. Above a ratio of 1.4 the exit code is 1, and `make test` fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.bench._costs.detokenizer import detokenizer
from pagewire.bench._costs.executor import executor
from pagewire.bench._costs.gateway import gateway
from pagewire.bench._costs.meter import Reading, measure
from pagewire.bench._costs.rig import Open
from pagewire.bench._costs.scheduler import scheduler
from pagewire.bench._costs.tokenizer import tokenizer, tokenizer_request
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.flags import Parser
from pagewire.shared.telemetry import logs

TOLERANCE = 1.4
"""Ratio to the recorded cost above which a cost has risen: between the noise of a busy machine, 1.2, and 1.5."""
ATTEMPTS = 3
"""Measurements before a cost counts as risen: noise adds to it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The measurement of a service, and its recorded result."""

    rig: Open
    unit: str
    recorded: float
    """Iterations of the yardstick per unit: `pagewire bench cost` prints it."""

    @property
    def limit(self) -> float:
        """The largest cost that is allowed."""
        return self.recorded * TOLERANCE


COSTS: Mapping[str, Cost] = {
    "tokenizer": Cost(tokenizer, "prompt token", 0.0105),
    "tokenizer, short prompts": Cost(tokenizer_request, "request", 5.5),
    "scheduler": Cost(scheduler, "token", 0.030),
    "executor": Cost(executor, "token", 0.032),
    "detokenizer": Cost(detokenizer, "token", 0.128),
    "gateway": Cost(gateway, "token", 0.23),
}


def main(arguments: list[str]) -> int:
    """Prints a line per service; returns 1 if one of them costs too much."""
    parser = Parser(prog="pagewire bench cost", description=__doc__)
    parser.add_argument("--services", nargs="+", default=list(COSTS), choices=COSTS, metavar="NAME", help="names")
    options = parser.parse_args(arguments)
    print(f"{'service':>24} {'unit':>12} {'CPU us':>8} {'cost':>8} {'recorded':>8} {'ratio':>6}")
    code = 0
    for name in options.services:
        cost, reading = COSTS[name], read(name)
        print(
            f"{name:>24} {cost.unit:>12} {reading.microseconds:>8.2f} {reading.cost:>8.4f} {cost.recorded:>8.4f}"
            f" {reading.cost / cost.recorded:>6.2f}",
            flush=True,
        )
        code |= reading.cost > cost.limit
    return code


def read(name: str) -> Reading:
    """Returns the least of up to `ATTEMPTS` readings, and measures no further once one is within the limit."""
    logs.configure(Settings(log_level="warning"), service="bench")
    readings: list[Reading] = []
    while len(readings) < ATTEMPTS:
        readings.append(measure(COSTS[name].rig))
        if readings[-1].cost <= COSTS[name].limit:
            break
    return min(readings, key=lambda reading: reading.cost)
