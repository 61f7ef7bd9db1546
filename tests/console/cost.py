"""Tokens per second with ten open event streams against none, in turns: `python -m tests.console.cost`."""

import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from tests.pagewire.serving import serving

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


def main() -> None:
    """Prints both rates, their ratio, and the bytes per second of one page."""
    with serving() as served:
        address = urlsplit(served.http).netloc
        tokens_per_second(address)
        alone, watched, received = [], [], list[int]()
        for _ in range(ROUNDS):
            alone.append(tokens_per_second(address))
            with ExitStack() as pages:
                began = time.perf_counter()
                for _ in range(PAGES):
                    pages.enter_context(page(address, received))
                watched.append(tokens_per_second(address))
                elapsed = time.perf_counter() - began
    ratios = [after / before for before, after in zip(alone, watched, strict=True)]
    print(f"without a page {statistics.median(alone):.1f} tokens/s, with {PAGES} {statistics.median(watched):.1f}")
    print(
        f"ratio of each round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; median {statistics.median(ratios):.3f}"
    )
    print(f"one page reads about {sum(received) / ROUNDS / PAGES / elapsed / 1000:.1f} kB/s")


if __name__ == "__main__":
    main()
