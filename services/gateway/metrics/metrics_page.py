"""`/metrics`: the metrics of all services of the stack, for Prometheus."""

import asyncio
from contextlib import suppress

from prometheus_client.registry import Collector

from pagewire.services.gateway.metrics import prometheus
from pagewire.services.gateway.metrics.vllm_metrics import VllmMetrics
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.metrics import MetricsReport

TIMEOUT = 0.5
"""Seconds in which an instance must answer to be on the page."""

_report = Decoder(MetricsReport)


class MetricsPage:
    """Collects the reports of all instances and writes the page."""

    def __init__(self, bus: Bus, *, vllm: bool) -> None:
        """`vllm`: whether the page also has the names that vLLM's dashboards read."""
        self._bus = bus
        self._vllm = vllm

    async def text(self, expected: int) -> bytes:
        """Returns the page, once as many instances have answered as are `expected`, or after `TIMEOUT`.

        Raises:
            BusUnavailable: there is no connection to the broker.
        """
        reports = await self._collect(expected)
        collectors: list[Collector] = [VllmMetrics(reports)] if self._vllm else []
        return prometheus.page(reports, *collectors)

    async def _collect(self, expected: int) -> list[MetricsReport]:
        reports: list[MetricsReport] = []
        complete = asyncio.Event()

        def add(reply: Message) -> None:
            report = _report.try_decode(reply.data)
            if report is not None:
                reports.append(report)
            if len(reports) >= expected:
                complete.set()

        with self._bus.inbox(add) as inbox, suppress(TimeoutError):
            self._bus.publish(subjects.METRICS, b"", reply=inbox)
            async with asyncio.timeout(TIMEOUT):
                await complete.wait()
        return sorted(reports, key=lambda report: (report.service, report.instance))
