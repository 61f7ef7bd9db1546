"""Configures structured logs on standard error: readable lines on a console, or one JSON object per line."""

import logging
import sys

import msgspec
import structlog
from structlog.typing import Processor

from pagewire.shared.config import Settings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_json = msgspec.json.Encoder(enc_hook=str)


def configure(settings: Settings, **bound: str) -> None:
    """Configures the logs of this process. The fields `bound`, such as the service, are added to every line."""
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if (settings.log_format or ("console" if sys.stderr.isatty() else "json")) == "json":
        processors += [structlog.processors.format_exc_info, _render]
        factory: structlog.BytesLoggerFactory | structlog.WriteLoggerFactory = structlog.BytesLoggerFactory(
            sys.stderr.buffer
        )
    else:
        # Plain tracebacks, since the others print local variables, which may be passwords.
        formatter = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=formatter))
        factory = structlog.WriteLoggerFactory(sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.log_level]),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def quiet() -> None:
    """Logs only warnings and errors, unless the program that uses Pagewire as a library has configured structlog."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        )


def _render(_: object, __: str, event: structlog.typing.EventDict) -> bytes:
    return _json.encode(event)
