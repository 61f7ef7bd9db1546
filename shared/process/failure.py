"""Logs why a service has failed."""

from collections.abc import Iterator

import structlog

from pagewire.shared.errors import BusUnavailable, DeviceLost

_KNOWN = BusUnavailable, DeviceLost
"""Errors of which a traceback would say no more than their message."""

_log = structlog.get_logger()


def log_failure(error: BaseException) -> None:
    """Logs the error that ends a service, or all errors of a group of its tasks: as one line, unless one is unknown."""
    errors = list(_single(error))
    reasons = dict.fromkeys(str(each) or type(each).__name__ for each in errors)
    known = all(isinstance(each, _KNOWN) for each in errors)
    _log.error("service_failed", reason=", ".join(reasons), exc_info=None if known else error)


def _single(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors of a group, however deep, or the error that is no group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _single(each)
    else:
        yield error
