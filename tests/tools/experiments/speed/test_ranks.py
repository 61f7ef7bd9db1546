from tools.experiments._common.turns import Cell
from tools.experiments.speed import ranks
from tools.experiments.speed.ranks import AGAIN, ONE, SEVERAL


def test_several_ranks_stand_behind_one_rank_measured_twice() -> None:
    cell = Cell("s1b bf16", "pagewire", 8, {ONE: [100.0, 50.0], SEVERAL: [90.0, 48.0], AGAIN: [100.0, 50.0]})
    assert ranks.table([cell])[-1] == "| s1b bf16, pagewire, 8 | 75.0 | 1.00 | 0.93 (0.90–0.96) |"
