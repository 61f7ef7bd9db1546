from functools import partial

from tools.experiments._common.turns import Cell, measure


def test_the_first_case_goes_first_in_every_other_round() -> None:
    asked: list[tuple[str, int]] = []

    def answer(name: str, clients: int) -> float:
        asked.append((name, clients))
        return float(len(asked))

    cells = [Cell("s135", "pagewire", clients) for clients in (1, 8)]
    measure(cells, {name: partial(answer, name) for name in ("first", "second")}, 2)
    one, other = ("first", "second"), ("second", "first")
    assert asked == [(name, clients) for order in (one, other) for clients in (1, 8) for name in order]
    assert [cell.rates for cell in cells] == [
        {"first": [1.0, 6.0], "second": [2.0, 5.0]},
        {"first": [3.0, 8.0], "second": [4.0, 7.0]},
    ]
