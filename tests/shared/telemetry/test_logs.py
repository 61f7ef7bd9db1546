"""Log lines as a process writes them, to a terminal and elsewhere."""

import json
import os
import pty
import subprocess
import sys

import pytest

BODY = """
import structlog
from pagewire.shared.settings import config
from pagewire.shared.telemetry import logs

logs.configure(config.load({}), service="probe", instance="probe1")
structlog.get_logger().info("begun", tokens=3)
try:
    password = "secret"
    raise OSError("lost")
except OSError:
    structlog.get_logger().exception("failed")
"""


LIBRARIES = """
import logging, warnings
from pagewire.shared.settings import config
from pagewire.shared.telemetry import logs

logs.configure(config.load({}), service="probe")
logging.getLogger("exporter").warning("cannot reach %s", "x")
logging.getLogger("exporter").info("not for everybody")
try:
    raise OSError("lost")
except OSError:
    logging.getLogger("loop").exception("never retrieved")
warnings.warn("old")
"""


def lines(body: str = BODY, *, terminal: bool = False, **environ: str) -> list[str]:
    """Returns the lines that a program writes to standard error."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, **environ}
    process = subprocess.Popen([sys.executable, "-c", body], env=environment, stderr=theirs)
    os.close(theirs)
    written = bytearray()
    try:
        while more := os.read(ours, 65536):
            written += more
    except OSError:  # how a terminal says that its last writer has gone
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0
    return written.decode().splitlines()


@pytest.mark.parametrize(("terminal", "asked"), [(False, {}), (True, {"PAGEWIRE_LOG_FORMAT": "json"})])
def test_json_logs_have_one_object_per_line(terminal: bool, asked: dict[str, str]) -> None:
    begun, failed = map(json.loads, lines(terminal=terminal, **asked))
    assert begun.pop("timestamp").endswith("Z")
    assert begun == {"event": "begun", "tokens": 3, "level": "info", "service": "probe", "instance": "probe1"}
    assert failed["event"] == "failed"
    assert "OSError: lost" in failed["exception"]


@pytest.mark.parametrize(("terminal", "asked"), [(True, {}), (False, {"PAGEWIRE_LOG_FORMAT": "console"})])
def test_console_logs_have_tracebacks_without_local_variables(terminal: bool, asked: dict[str, str]) -> None:
    written = lines(terminal=terminal, **asked)
    assert "begun" in written[0]
    assert "probe1" in written[0]
    assert not written[0].startswith("{")
    assert any("OSError: lost" in line for line in written)
    assert not any("secret" in line for line in written)


def test_lines_of_libraries_look_like_our_own() -> None:
    unreachable, failed, warned = map(json.loads, lines(LIBRARIES))
    assert unreachable.pop("timestamp").endswith("Z")
    assert unreachable == {
        "event": "library",
        "logger": "exporter",
        "message": "cannot reach x",
        "level": "warning",
        "service": "probe",
    }
    assert (failed["logger"], failed["level"]) == ("loop", "error")
    assert "OSError: lost" in failed["exception"]
    assert "UserWarning: old" in warned["message"]


def test_colours_are_for_terminals() -> None:
    assert "\x1b[" in lines(terminal=True, TERM="xterm", PAGEWIRE_LOG_FORMAT="console")[0]
    assert "\x1b[" not in lines(terminal=False, TERM="xterm", PAGEWIRE_LOG_FORMAT="console")[0]


def test_the_level_changes_while_the_process_runs() -> None:
    body = """
import structlog
from pagewire.shared.settings import config
from pagewire.shared.telemetry import logs

settings = config.load({"log-level": "warning"})
logs.configure(settings, service="probe", instance="probe1")
log = structlog.get_logger()
for i in range(3):
    log.debug("seen", turn=i)
    log.info("seen", turn=i)
    logs.toggle_debug(settings)
"""
    run = subprocess.run([sys.executable, "-c", body], capture_output=True, check=True, timeout=60)
    written = [json.loads(line) for line in run.stderr.splitlines()]
    assert [(line["level"], line["turn"]) for line in written if line["event"] == "seen"] == [("debug", 1), ("info", 1)]
    assert [line["log_level"] for line in written if "log_level" in line] == ["debug", "warning", "debug"]
