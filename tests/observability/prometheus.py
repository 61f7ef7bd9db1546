"""A Prometheus of its own, with the rules of deploy/alerts.yml made fast."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RANGE = "20s"
"""The range of rates: every figure changes within it."""
PATIENCE = 90.0
"""Seconds that a query or an alert may take to come true."""
DEPLOY = Path(__file__).parents[2] / "deploy"


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        series: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return series

    def alerts(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def range(self, expression: str, start: float, end: float) -> list[tuple[float, float]]:
        """The only series of an expression, with a point per second."""
        (series,) = self._get("query_range", query=expression, start=start, end=end, step=1)["result"]
        return [(at, float(value)) for at, value in series["values"]]

    def _get(self, path: str, **arguments: object) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrapes a gateway once a second."""
    rules = re.sub(r"\[\d+m\]", f"[{RANGE}]", (DEPLOY / "alerts.yml").read_text())
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+[ms]", "for: 1s", rules))
    config = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:8000", target)
    fast = "scrape_interval: 1s\n  scrape_timeout: 900ms\n  evaluation_interval: 1s"
    (folder / "prometheus.yml").write_text(config.replace("scrape_interval: 15s", fast))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=folder)
    try:
        server = Prometheus(f"http://{address}")
        wait(lambda: _answers(server), "Prometheus answers")
        yield server
    finally:
        process.terminate()
        process.wait(20)


def wait(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Returns once a condition holds.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"this did not come true: {what}"
        time.sleep(0.2)


def _answers(server: Prometheus) -> bool:
    try:
        server.query("vector(1)")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True
