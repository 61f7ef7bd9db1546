"""A client that sends one request with nats-py and then only reads its inbox: it asks for nothing again."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from pagewire.shared import subjects

END = ("final", "result", "error")


class BareReader:
    """The frames of one request as they came.

    Attributes:
        accepted: number of `accepted` frames: one per detokenizer that had the stream.
        repeated: number of deltas that came again.
        problems: what no client may see: frames out of order, and repetitions that differ.
        arrivals: monotonic times at which new deltas came.
    """

    def __init__(self, client: Client, model: str, request: dict[str, Any]) -> None:
        self.accepted = 0
        self.repeated = 0
        self.problems: list[str] = []
        self.arrivals: list[float] = []
        self._client = client
        self._subject = f"{subjects.GENERATE}.{model}"
        self._request = request
        self._deltas: dict[tuple[int, int], bytes] = {}
        self._end: dict[str, Any] | None = None
        self._ended = asyncio.Event()

    async def send(self) -> None:
        """Sends the request."""
        inbox = self._client.new_inbox()
        await self._client.subscribe(inbox, cb=self._on_message)
        await self._client.publish(self._subject, msgspec.json.encode(self._request), reply=inbox)

    async def answer(self) -> tuple[dict[tuple[int, int], bytes], dict[str, Any] | None]:
        """Waits for the end; returns the deltas by (index, start), and how the request ended."""
        await self._ended.wait()
        return self._deltas, self._end

    @property
    def tokens(self) -> int:
        """Different deltas so far."""
        return len(self._deltas)

    def pause(self, since: float) -> float:
        """Returns the longest time between two new deltas after a moment; 0 if none came before or after it."""
        times = [max((t for t in self.arrivals if t <= since), default=0.0), *(t for t in self.arrivals if t > since)]
        return max((b - a for a, b in pairwise(times) if a), default=0.0)

    async def _on_message(self, message: Msg) -> None:
        if self._ended.is_set() or not message.data:
            return
        frame = msgspec.json.decode(message.data)
        self.accepted += frame["type"] == "accepted"
        if frame["type"] == "delta":
            self._on_delta((frame["index"], frame["start"]), message.data)
        elif frame["type"] in END:
            # Ids are random, times differ, and what was cached depends on what ran before.
            self._end = {key: value for key, value in frame.items() if key not in {"request_id", "usage", "metrics"}}
            self._ended.set()

    def _on_delta(self, place: tuple[int, int], data: bytes) -> None:
        index, start = place
        if place in self._deltas:
            self.repeated += 1
            if self._deltas[place] != data:
                self.problems.append(f"{place} came again and differs")
            return
        if start and (index, start - 1) not in self._deltas:
            self.problems.append(f"{place} came before the token ahead of it")
        self._deltas[place] = data
        self.arrivals.append(time.monotonic())
