"""The line of progress."""

from types import SimpleNamespace
from typing import Any

from tests.support.progress import INTERVAL, Progress


def report(*, passed: bool, when: str = "call") -> Any:
    return SimpleNamespace(
        nodeid="a.py::test_a", outcome="passed" if passed else "failed", failed=not passed, when=when
    )


def test_a_line_comes_once_a_minute_and_at_a_failure() -> None:
    lines: list[str] = []
    times = iter((0.0, 1.0, INTERVAL + 1, INTERVAL + 2, 2 * INTERVAL + 2))
    progress = Progress(lines.append, lambda: next(times))
    progress.pytest_xdist_node_collection_finished(None, ["a", "b", "c", "d"])
    for _ in range(3):
        progress.pytest_runtest_logfinish()
    assert lines == ["1 min: 2 of 4 tests"]
    progress.pytest_runtest_logreport(report(passed=False))
    progress.pytest_runtest_logfinish()
    assert lines[1:] == ["failed: a.py::test_a", "2 min: 4 of 4 tests, 1 failed"]


def test_a_test_that_has_ended_leaves_no_letter() -> None:
    progress = Progress(print)
    assert progress.pytest_report_teststatus(report(passed=True)) == ("passed", "", "PASSED")
    assert progress.pytest_report_teststatus(report(passed=False)) == ("failed", "", "FAILED")
    assert progress.pytest_report_teststatus(report(passed=False, when="setup")) is None
