"""One line of progress a minute, and one per failure, instead of a letter per test: a long run is seen to live."""

import time
from collections.abc import Callable

import pytest

INTERVAL = 60.0
"""Seconds between two lines."""


class Progress:
    """Counts the tests that have ended; with xdist it is registered in the controller, which hears of all of them."""

    def __init__(self, write_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write_line = write_line
        self._clock = clock
        self._began = self._written = clock()
        self._total = self._ended = self._failed = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learns how many tests there are; the controller of xdist collects none."""
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Learns the number from a worker: each collects all tests."""
        self._total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a failure, be it of the test or of its fixtures, and names the test at once."""
        if report.failed:
            self._failed += 1
            self._write_line(f"failed: {report.nodeid}")

    def pytest_runtest_logfinish(self) -> None:
        """Counts a test and writes the line when it is due."""
        self._ended += 1
        now = self._clock()
        if now - self._written >= INTERVAL:
            self._written = now
            minutes = round((now - self._began) / 60)
            failed = f", {self._failed} failed" if self._failed else ""
            self._write_line(f"{minutes} min: {self._ended} of {self._total} tests{failed}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Leaves out the letter of a test that has ended: the lines count them."""
        plain = (report.when == "call" or report.outcome == "skipped") and not hasattr(report, "wasxfail")
        return (report.outcome, "", report.outcome.upper()) if plain else None
