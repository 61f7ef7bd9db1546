"""A client process of `vllm_gpu`: sends its requests and writes down when the chunks of the answers came."""

import asyncio
import time
from dataclasses import dataclass, field

from pagewire.bench._common.event_stream import post
from pagewire.shared.errors import ConfigurationError


@dataclass(slots=True)
class Planned:
    """A request before it is sent."""

    prompt: str
    max_tokens: int
    at: float
    """Seconds after the start of the stage."""


@dataclass(slots=True)
class Record:
    """The answer to a request. Times are monotonic seconds of the machine."""

    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """Times of the chunks with text."""
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = "late"
    """Empty: all tokens have come."""


def send_all(url: str, requests: list[Planned], clients: int | None, start: float, limit: float) -> list[Record]:
    """Sends requests at their times, no more than `clients` at once, None: all; returns the answers.

    `start` is the time of the first one, in monotonic seconds of the machine; after `limit` seconds an answer is late.
    """
    return asyncio.run(_send(url, requests, clients or len(requests), start, limit))


async def _send(url: str, requests: list[Planned], clients: int, start: float, limit: float) -> list[Record]:
    room, records = asyncio.Semaphore(clients), [Record() for _ in requests]
    tasks = [
        asyncio.create_task(_ask(url, request, record, room, start))
        for request, record in zip(requests, records, strict=True)
    ]
    _, late = await asyncio.wait(tasks, timeout=max(start + limit - time.monotonic(), 0.1))
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return records


async def _ask(url: str, request: Planned, record: Record, room: asyncio.Semaphore, start: float) -> None:
    body = {
        "model": "m",
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await asyncio.sleep(max(start + request.at - time.monotonic(), 0.0))
    async with room:
        record.sent = time.monotonic()
        try:
            async for event in post(f"{url}/v1/completions", body):
                now = time.monotonic()
                if "error" in event:
                    raise ConfigurationError(str(event["error"])[:300])
                if usage := event.get("usage"):
                    record.tokens, record.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    record.chunks.append(now)
        except ConfigurationError as error:
            record.error = str(error)[:300]
        else:
            record.error = "" if record.chunks and record.tokens == request.max_tokens else "cut short"
