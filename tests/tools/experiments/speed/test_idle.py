from tools.experiments.speed.idle import table


def test_a_row_has_the_share_of_a_service_in_each_version() -> None:
    lines = table({"here": {"executor": 0.004, "scheduler": 0.01}, "base": {"executor": 0.0051}})
    assert lines[0] == "| service | here | base |"
    assert lines[2:] == ["| executor | 0.40% | 0.51% |", "| scheduler | 1.00% | 0.00% |", "| all | 1.40% | 0.51% |"]
