from tools.experiments._common.turns import Cell
from tools.experiments.speed import adapters
from tools.experiments.speed.adapters import AGAIN, ALL, ONE, PLAIN, WITHOUT


def test_ratios_are_of_the_same_round() -> None:
    rates = {WITHOUT: [100.0, 50.0], AGAIN: [100.0, 50.0], PLAIN: [99.0, 50.0], ONE: [90.0, 40.0], ALL: [80.0, 40.0]}
    row = adapters.table([Cell("s135", "pagewire", 8, rates)])[-1]
    assert row == "| s135, pagewire, 8 | 75.0 | 1.00 | 0.99 (0.99–1.00) | 0.85 (0.80–0.90) | 0.80 |"
