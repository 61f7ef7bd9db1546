"""Sends requests to /v1/completions, and counts the tokens per second."""

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pagewire.bench.cpu_step import VOCABULARY

PROMPT, TOKENS = 64, 48
"""Tokens of a prompt and of an answer."""
LEAST = 2
"""Least requests of a measurement, which has one per client."""
ANSWER_WITHIN = 600
"""Seconds within which an answer must come."""


def prompt(number: int, tokens: int) -> list[int]:
    """Returns random token ids, the same ones for a number."""
    draw = random.Random(number)
    return [draw.randrange(1000, VOCABULARY - 1000) for _ in range(tokens)]


def model_rate(port: int, models: Sequence[str], clients: int) -> float:
    """Returns the generated tokens per second of greedy requests for the `models` in turn: one per client, `LEAST` at
    least, each with a prompt of its own.

    Raises:
        SystemExit: the server of this machine has refused one.
    """
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    bodies = [
        {"model": models[number % len(models)], "prompt": prompt(number, PROMPT), **sampling}
        for number in range(max(LEAST, clients))
    ]
    return rate(port, bodies, clients)


def rate(port: int, bodies: Sequence[Mapping[str, Any]], clients: int) -> float:
    """Returns the generated tokens per second of all requests together, `clients` of which run at a time.

    Raises:
        SystemExit: the server of this machine has refused one.
    """
    with ThreadPoolExecutor(clients) as threads:
        began = time.perf_counter()
        count = sum(threads.map(lambda body: _complete(port, body), bodies))
        return count / (time.perf_counter() - began)


def _complete(port: int, body: Mapping[str, Any]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"a request to port {port} was answered with {answer.status}: {text[:500]!r}")
    return int(json.loads(text)["usage"]["completion_tokens"])
