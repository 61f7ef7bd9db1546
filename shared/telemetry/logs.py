"""Configures structured logs on standard error: readable lines on a console, or one JSON object per line."""

import logging
import sys

import msgspec
import structlog
from structlog.typing import Processor
from typing_extensions import override

from pagewire.shared.settings.config import Settings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_json = msgspec.json.Encoder(enc_hook=str)


_Logger = type("Logger", (structlog.make_filtering_bound_logger(logging.INFO),), {})
"""The class of all loggers. They are cached, so the level changes with the base of their class."""


def configure(settings: Settings, **bound: str) -> None:
    """Configures the logs of this process. The fields `bound`, such as the service, are added to every line."""
    _set_level(_LEVELS[settings.log_level])
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
        wrapper_class=_Logger,
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
    logging.captureWarnings(capture=True)
    logging.basicConfig(handlers=[_Libraries()])  # without effect where the program has handlers of its own


class _Libraries(logging.Handler):
    """Writes the log records of libraries as lines like our own."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, "library", logger=record.name, message=record.getMessage().strip(), exc_info=record.exc_info
        )


def toggle_debug(settings: Settings) -> None:
    """Logs every level from now on, or only those of the settings if every level is logged already."""
    debugs = structlog.get_logger().is_enabled_for(logging.DEBUG)
    name = settings.log_level if debugs else "debug"
    _set_level(_LEVELS[name])
    structlog.get_logger().warning("log_level_changed", log_level=name)


def _set_level(level: int) -> None:
    """Drops lines below the level, at no cost, from now on."""
    _Logger.__bases__ = (structlog.make_filtering_bound_logger(level),)


def quiet() -> None:
    """Logs only warnings and errors, unless the program that uses Pagewire as a library has configured structlog."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        )


def _render(_: object, __: str, event: structlog.typing.EventDict) -> bytes:
    return _json.encode(event)
