"""Tokens per second with ten open event streams against none, in turns: `python -m tests.console.cost`.

Each round measures without a page, with the pages, and without one again: the ratio of the first and the last shows by
how much the machine itself varies.

The CPU time of the services is printed beside it, which other work on the machine changes less than the rate.
"""

import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import psutil

from tests.pagewire.serving import Served, serving

PAGES = 10
ROUNDS = 7
REQUESTS = 8
TOKENS = 300
BODY = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@contextmanager
def page(address: str, received: list[int]) -> Iterator[None]:
    """Reads an event stream, as an open page does, on a thread of its own."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/console/events")
    response = connection.getresponse()
    closing = threading.Event()

    def read() -> None:
        while not closing.is_set() and (line := response.readline()):
            received.append(len(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        closing.set()
        reader.join()
        connection.close()


def tokens_per_second(address: str) -> float:
    """Sends requests side by side; returns the generated tokens per second."""

    def complete(_: int) -> int:
        connection = http.client.HTTPConnection(address)
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return int(answer["usage"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as threads:
        tokens = sum(threads.map(complete, range(REQUESTS)))
    return tokens / (time.perf_counter() - began)


def cpu_seconds(served: Served) -> float:
    """CPU time that all services have taken."""
    times = [psutil.Process(pid).cpu_times() for pid in served.processes()]
    return sum(each.user + each.system for each in times)


def measure(served: Served) -> tuple[float, float]:
    """Returns generated tokens per second, and CPU seconds of the services."""
    before = cpu_seconds(served)
    rate = tokens_per_second(urlsplit(served.http).netloc)
    return rate, cpu_seconds(served) - before


def print_ratios(name: str, numerators: Sequence[float], denominators: Sequence[float]) -> None:
    """Prints the ratio of each round and their median."""
    ratios = [over / under for over, under in zip(numerators, denominators, strict=True)]
    print(f"  {name}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; median {statistics.median(ratios):.3f}")


def main() -> None:
    """Prints rates, CPU times, their ratios, and the bytes per second of one page."""
    before, watched, after = (list[tuple[float, float]]() for _ in range(3))
    received = list[int]()
    elapsed = 0.0
    with serving() as served:
        address = urlsplit(served.http).netloc
        tokens_per_second(address)
        for _ in range(ROUNDS):
            before.append(measure(served))
            with ExitStack() as pages:
                began = time.perf_counter()
                for _ in range(PAGES):
                    pages.enter_context(page(address, received))
                watched.append(measure(served))
                elapsed += time.perf_counter() - began
            after.append(measure(served))
    for index, unit in enumerate(("tokens/s", "CPU seconds")):
        first, paged, last = ([each[index] for each in figures] for figures in (before, watched, after))
        alone = [statistics.mean(pair) for pair in zip(first, last, strict=True)]
        print(f"{unit}: without a page {statistics.median(alone):.2f}, with {PAGES} {statistics.median(paged):.2f}")
        print_ratios(f"with {PAGES} pages / without", paged, alone)
        print_ratios("without / without", last, first)
    print(f"one page reads about {sum(received) / PAGES / elapsed / 1000:.1f} kB/s")


if __name__ == "__main__":
    main()
