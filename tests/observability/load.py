"""Clients that keep a stack busy until they are told to stop."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SENTENCE = "It was the best of times, it was the worst of times. "


@contextmanager
def load(http: str, clients: int, **changes: object) -> Iterator[None]:
    """Sends requests over HTTP, one after the other in each of several clients, whatever becomes of them."""
    stop = threading.Event()

    def client(number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            body = {"prompt": f"{number} {count} {SENTENCE * 6}", "max_tokens": 60, "ignore_eos": True, **changes}
            post(http, body)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def post(http: str, body: dict[str, object]) -> int:
    """Sends one request for text; returns the status of its answer, 0 where there is none."""
    request = urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
