"""Builds the image, starts compose.yaml as it is, and breaks it while it serves: `make test-containers`.

Needs Docker or podman, and a Compose, Docker's or podman's: ENGINE names the program, COMPOSE the command of Compose.
With --no-build the image `pagewire` is there already.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import nats

from tests.containers.engine import ENGINE, ROOT, compose, containers, health_checks, healthy, restarts, run, signal

URL = "http://127.0.0.1:8000"
BODY = {"prompt": "Once upon a time", "max_tokens": 180, "temperature": 0, "ignore_eos": True}
BACK_WITHIN = 30.0
"""Seconds after which a frozen service serves again."""


def main() -> int:
    """Runs all checks; returns 0, or raises what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.containers", description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="use the image that is there")
    options = parser.parse_args()
    run("make", "--silent", "secrets")
    key = dict(line.split("=", 1) for line in Path(ROOT, ".env").read_text().splitlines())["PAGEWIRE_API_KEY"]
    if not options.no_build:
        compose("build")
    try:
        with health_checks():
            check(key)
    finally:
        compose("down", "--volumes", "--remove-orphans", "--timeout", "50")
    assert not containers(ended=True), "containers are left"
    say("down: nothing is left")
    return 0


def check(key: str) -> None:
    """Starts the stack and breaks it."""
    up(300)
    say("up: all services are healthy")
    expected = complete(key)
    say(f"over HTTP: {len(expected)} characters")
    assert asyncio.run(ask_nats(key)) == expected, "NATS and HTTP disagree"
    say("over bare NATS: the same text")
    for service in ("executor", "nats"):
        (victim,) = containers(service)
        assert stream(key, lambda victim=victim: signal(victim, "KILL")) == expected, f"{service} changed the text"  # type: ignore[misc]
        until(lambda victim=victim: restarts(victim) > 0, 60, f"{service} is restarted")  # type: ignore[misc]
        say(f"{service} killed in the middle of a stream: the same text, and it was restarted")
    (frozen,) = containers("detokenizer")
    before = restarts(frozen)
    signal(frozen, "STOP")
    began = time.monotonic()
    until(lambda: restarts(frozen) > before, BACK_WITHIN, "the frozen service is restarted")
    assert complete(key) == expected
    took = time.monotonic() - began
    assert took < BACK_WITHIN, took
    say(f"a frozen detokenizer: serves again after {took:.0f} s")
    up(120, "--scale", "detokenizer=2", "--no-recreate")
    (added,) = {*containers("detokenizer")} - {frozen}
    assert complete(key) == expected
    say("scaled to two detokenizers: all healthy, the same text")
    run(ENGINE, "rm", "--force", added)
    assert complete(key) == expected
    say("one of them removed: the same text")
    os.environ["PAGEWIRE_DATA_PARALLEL_SIZE"] = "2"
    up(120, "--no-recreate")
    assert [len(containers(service)) for service in ("executor", "scheduler")] == [2, 2]
    assert complete(key) == expected
    say("two replicas: all healthy, the same text")


def up(seconds: float, *arguments: str) -> None:
    """Starts what does not run, and waits until all is healthy: not every Compose can wait for that."""
    compose("up", "--detach", "--no-build", *arguments)
    until(lambda: all(map(healthy, containers())), seconds, "every container is healthy")


def complete(key: str) -> str:
    """The answer over HTTP."""
    with urllib.request.urlopen(request(key, BODY), timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def stream(key: str, strike: Callable[[], None]) -> str:
    """The answer over HTTP as a stream; `strike` is called when a quarter of it is there."""
    texts: list[str] = []
    striking: threading.Thread | None = None
    with urllib.request.urlopen(request(key, {**BODY, "stream": True}), timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if striking is None and len(texts) > 40:
                striking = threading.Thread(target=strike)
                striking.start()
    assert striking is not None, "the answer was too short"
    striking.join()
    return "".join(texts)


def request(key: str, body: dict[str, object]) -> urllib.request.Request:
    """A request for text."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode(), headers)


async def ask_nats(key: str) -> str:
    """The answer to a client that has nothing but nats-py."""
    connection = await nats.connect("nats://127.0.0.1:4222", user="client", password=key)
    prompt, sampling = BODY["prompt"], {name: value for name, value in BODY.items() if name != "prompt"}
    body = json.dumps({"prompt": prompt, "sampling": sampling}).encode()
    reply = await connection.request("pagewire.v1.generate.bundled", body, timeout=60)
    await connection.close()
    text: str = json.loads(reply.data)["choices"][0]["text"]
    return text


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns once a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"this did not come true: {what}"
        time.sleep(0.5)


def say(text: str) -> None:
    """Prints what was found."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
