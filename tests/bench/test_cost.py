"""No service may come to cost half as much again, and the test would see it if one did."""

import math
from functools import cache

import pytest

from pagewire.bench import cost
from pagewire.bench._costs import reference
from pagewire.bench._costs.meter import Reading, measure
from pagewire.bench._costs.tap import Wrap
from pagewire.bench.cost import ATTEMPTS, COSTS, TOLERANCE
from pagewire.services.detokenizer import fence
from pagewire.shared.bus import Handler, Message

pytestmark = pytest.mark.alone

read = cache(cost.read)


@pytest.fixture(autouse=True)
def unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are CPU time, so it does not matter that a busy machine lets the process stand still."""
    monkeypatch.setattr(fence, "LIMIT", math.inf)


def dearer(iterations: float) -> Wrap:
    """Puts work of so many iterations of the yardstick in front of each message that is fed; whole ones when due."""
    owed, done = 0.0, 0

    def wrap(handler: Handler) -> Handler:
        def handle(message: Message) -> None:
            nonlocal owed, done
            owed += iterations
            reference.run(int(owed) - done, first=done)
            done = int(owed)
            handler(message)

        return handle

    return wrap


@pytest.mark.parametrize("name", COSTS)
def test_no_service_costs_half_as_much_again(name: str) -> None:
    cost, reading = COSTS[name], read(name)
    assert reading.cost <= cost.limit, (
        f"a {cost.unit} costs {reading.cost:.4f} iterations of the yardstick, and {cost.recorded:.4f} are recorded: if"
        " that is meant, write the cost that `pagewire bench cost` prints into bench/cost.py"
    )


@pytest.mark.parametrize("name", COSTS)
def test_a_rise_by_half_is_seen(name: str) -> None:
    rig, plain = COSTS[name].rig, read(name)
    for _ in range(2 * ATTEMPTS):
        # Noise adds to a cost: half of one measured with noise, put on one without, looks like less than half.
        plain = min(plain, measure(rig), key=lambda reading: reading.cost)
        half = plain.cost * plain.per_message / 2
        if measure(rig, dearer(half)).cost > plain.cost * TOLERANCE:
            return
    pytest.fail(f"{name}: half as much again was not seen in {2 * ATTEMPTS} attempts")


def test_noise_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = COSTS["gateway"].recorded
    coming = [Reading(recorded * factor, 9.0, 1.0) for factor in (1.9, 1.1, 1.0)]
    monkeypatch.setattr(cost, "measure", lambda rig: coming.pop(0))
    assert cost.read("gateway").cost == recorded * 1.1
    assert len(coming) == 1


def test_a_rise_is_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = COSTS["gateway"].recorded
    coming = [Reading(recorded * factor, 9.0, 1.0) for factor in (1.9, 1.5, 1.6)]
    monkeypatch.setattr(cost, "measure", lambda rig: coming.pop(0))
    assert cost.read("gateway").cost == recorded * 1.5
    assert not coming


def test_the_command_prints_a_line_per_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rising(name: str) -> Reading:
        return Reading(COSTS[name].recorded * (1.5 if name == "gateway" else 1.0), 9.0, 1.0)

    monkeypatch.setattr(cost, "read", rising)
    assert cost.main(["--services", "scheduler"]) == 0
    assert cost.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 + len(COSTS)
    assert lines[1].split()[-1] == "1.00"
    assert lines[-1].split()[-1] == "1.50"
