"""Scrapes a stack under load with Prometheus, and breaks it until every alert has fired: `make test-observability`.

Needs the programs `prometheus` and `promtool` (Debian: the package prometheus) and `unshare`. The stack simulates its
device, so that a step takes as long as one of a large model; its broker has a small disk in memory.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml

from pagewire import Client
from pagewire.shared.errors import Overloaded, PagewireError
from pagewire.shared.metrics.metric import Kind, Metric
from pagewire.shared.metrics.table import METRICS
from tests.observability import vllm
from tests.observability.load import SENTENCE, load, post
from tests.observability.prometheus import DEPLOY, RANGE, Prometheus, prometheus, wait
from tests.pagewire.serving import COMMAND, Served, serving
from tests.support.model_folders import change, model_folder
from tools.experiments._common import chart

LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
DISK = "1100m"
"""Size of the broker's disk: little more than what PagewireDiskLow wants to be left."""
FLAGS = (
    *(
        "--device",
        "sim:h100",
        "--max-num-seqs",
        "4",
        "--num-kv-blocks",
        "40",
        "--max-model-len",
        "320",
        "--served-model-name",
        "tiny",
    ),
    *("--lease-window", "1", "--metrics-compat", "vllm", "--log-level", "error"),
)
"""Few slots and blocks, and a scheduler that is asked before every step: so that queues and preemptions come."""
READY = 'pagewire_ready{{service_name="pagewire-{}"}} == 1'
RARE = {"pagewire_replies_dropped_total"}
"""Metrics that need a client which does not keep to the protocol: they are there, and 0."""


def main() -> int:
    """Runs all checks; returns 0, or raises AssertionError with what did not come true."""
    parser = argparse.ArgumentParser(prog="python -m tests.observability", description=__doc__)
    parser.add_argument("--chart", type=Path, help="write what was scraped under load as a picture, in SVG")
    options = parser.parse_args()
    if missing := [program for program in ("prometheus", "promtool", "unshare") if shutil.which(program) is None]:
        print(f"not installed: {', '.join(missing)} (Debian: apt-get install prometheus util-linux)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="pagewire-observability-") as name:
        folder = Path(name)
        disk = folder / "disk"
        disk.mkdir()
        (folder / "prometheus").mkdir()
        change(model_folder(folder / "model") / "config.json", **LARGE)
        mounted = f'mount -t tmpfs -o size={DISK} tmpfs {disk} && exec "$@"'
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", *COMMAND]
        began = time.time()
        stack = serving(
            *(*FLAGS, "--model", str(folder / "model")),
            command=command,
            TMPDIR=str(disk),
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:9/v1/traces",  # nobody listens
        )
        with stack as served, prometheus(folder / "prometheus", served.http.removeprefix("http://")) as scraped:
            fired = check(scraped, served, Path(f"/proc/{served.process.pid}/root{disk}"))
            if options.chart is not None:
                options.chart.write_text(picture(scraped, began))
            served.process.send_signal(signal.SIGKILL)
            fires(scraped, "PagewireDown")
    print(f"alerts that have fired: {', '.join([*fired, 'PagewireDown'])}")
    names = {
        rule["alert"]
        for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    }
    assert names == {*fired, "PagewireDown"}, names.symmetric_difference({*fired, "PagewireDown"})
    return 0


def check(scraped: Prometheus, served: Served, disk: Path) -> list[str]:
    """Checks metrics, queries and alerts; returns the alerts that have fired."""
    fired: list[str] = []

    def expect(*names: str) -> None:
        fires(scraped, *names)
        fired.extend(names)

    post(served.http, {"prompt": "refused", "max_tokens": -1})
    with load(served.http, 250, max_tokens=150):
        wait(lambda: not without_data(scraped), f"every metric has data, but {without_data(scraped)}")
        print(f"{len(METRICS)} metrics have data")
        queries = [*dashboard(), *vllm.queries()]
        for query in queries:
            expression = query.replace("$__rate_interval", RANGE).replace("$model_name", "tiny")
            wait(lambda expression=expression: scraped.query(expression), expression)  # type: ignore[misc]
        print(f"{len(queries)} queries of the dashboard and of vLLM's have series")
        lint(served)
        expect("PagewireKvCacheSmall", "PagewireDeviceStarved", "PagewireQueueLong", "PagewireSpansDropped")
        with Client(served.nats) as client:
            wait(lambda: refused(client) and "PagewireRefuses" in scraped.alerts(), "PagewireRefuses fires")
        fired.append("PagewireRefuses")

        os.kill(served.service("executor"), signal.SIGKILL)
        expect("PagewireExecutorLost")
        wait(lambda: scraped.query(READY.format("executor")), "the executor is back")
        os.kill(served.service("tokenizer"), signal.SIGSTOP)  # until its supervisor ends it
        wait(lambda: not scraped.query(READY.format("tokenizer")), "the tokenizer is missed")
        expect("PagewireServiceMissing")
        wait(lambda: scraped.query(READY.format("tokenizer")), "the tokenizer is back")
        broker = next(pid for pid in served.processes() if "nats-server" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(broker, signal.SIGKILL)
        expect("PagewireBrokerLost")

        full = disk / "full"
        full.write_bytes(bytes(200 << 20))
        expect("PagewireDiskLow")
        fill(full)
        expect("PagewireStoreRefuses")
        expect("PagewireErrors", "PagewireRecordsWait")
        full.unlink()
    return fired


def fires(scraped: Prometheus, *names: str) -> None:
    """Waits until all of these alerts have fired."""
    for name in names:
        wait(lambda name=name: name in scraped.alerts(), f"{name} fires")  # type: ignore[misc]
        print(f"{name} fires", flush=True)


def without_data(scraped: Prometheus) -> list[str]:
    """The metrics that are declared and have no series."""
    return [name for metric in METRICS.values() if not scraped.query(name := series_of(metric)) and name not in RARE]


def series_of(metric: Metric) -> str:
    """The name of a series of a metric."""
    return metric.prometheus_name + {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]


def dashboard() -> list[str]:
    """The queries of the dashboard."""
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def lint(served: Served) -> None:
    """Has promtool read the page, as far as the names are not vLLM's."""
    with urllib.request.urlopen(f"{served.http}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    own = "".join(line for line in page.splitlines(keepends=True) if "vllm:" not in line)
    subprocess.run(["promtool", "check", "metrics"], input=own, text=True, check=True)
    print("promtool check metrics: nothing to say")


def refused(client: Client) -> bool:
    """Whether a request with little time is refused for want of it."""
    try:
        client.generate(SENTENCE, max_tokens=1, timeout=3.0)
    except Overloaded:
        return True
    except PagewireError:
        return False
    return False


def fill(file: Path) -> None:
    """Writes until the disk is full."""
    with file.open("ab", buffering=0) as out:
        try:
            while True:
                out.write(bytes(1 << 20))
        except OSError:
            return


def picture(scraped: Prometheus, began: float) -> str:
    """The rates and the queue from the start to now."""
    now = time.time()
    queries = {
        "tokens/s": f"sum(rate(pagewire_tokens_generated_total[{RANGE}]))",
        "waiting": "sum(pagewire_requests_waiting)",
        "expected wait, s": "max(pagewire_admission_expected_wait_seconds)",
        "KV cache, %": "100 * max(pagewire_kv_usage_ratio)",
    }
    lines = {
        name: [(at - began, value) for at, value in scraped.range(query, began, now)] for name, query in queries.items()
    }
    return chart.chart("What Prometheus scraped under load and faults (simulated device)", "seconds", "", lines)


if __name__ == "__main__":
    sys.exit(main())
