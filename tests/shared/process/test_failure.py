"""The log line of a service that has failed."""

import pytest
from structlog.testing import capture_logs

from pagewire.shared.errors import BusUnavailable, DeviceLost
from pagewire.shared.process.failure import log_failure

LOST = DeviceLost("rank 1 has ended")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LOST, "rank 1 has ended"),
        (ExceptionGroup("tasks", [ExceptionGroup("tasks", [LOST])]), "rank 1 has ended"),
        (ExceptionGroup("tasks", [LOST, BusUnavailable("no broker"), LOST]), "rank 1 has ended, no broker"),
    ],
)
def test_known_errors_are_one_line_with_their_reasons(error: Exception, reason: str) -> None:
    with capture_logs() as lines:
        log_failure(error)
    assert [(line["event"], line["reason"], line["exc_info"]) for line in lines] == [("service_failed", reason, None)]


def test_a_group_with_an_unknown_error_keeps_its_traceback() -> None:
    error = ExceptionGroup("tasks", [LOST, KeyError()])
    with capture_logs() as lines:
        log_failure(error)
    assert [(line["reason"], line["exc_info"]) for line in lines] == [("rank 1 has ended, KeyError", error)]
