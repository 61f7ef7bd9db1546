"""Harms the store as an operator with all rights may, who fills it and deletes, purges, edits or pauses its streams,
and as a disk does that loses a part of them."""

import asyncio
import os
import signal
from typing import Any

import msgspec

from pagewire.bench._chaos.schedule import DELETE, EDIT, FULL, PAUSE, PURGE
from pagewire.embedded.broker import Broker
from pagewire.shared.bus import Bus
from pagewire.shared.bus.streams import WORK_STREAM

OTHER = "OTHER"
"""The stream of somebody else that fills the store."""
PIECE = 1 << 20
"""Bytes of each message that fills the store, until not even a small one fits."""
FAR = "2100-01-01T00:00:00Z"
"""Time until which consumers are paused: nobody but the stack continues them."""
TIMEOUT = 30.0
"""Seconds within which JetStream must answer, and the stack must have restored the stream."""
LOOK_INTERVAL = 0.1
"""Seconds between two checks of the stream."""


async def disturb_store(bus: Bus, action: str, seconds: float) -> None:
    """Lets a fault of the store happen, and returns when it is over; only a full store is over after `seconds`."""
    match action:
        case _ if action == FULL:
            await _fill(bus, seconds)
        case _ if action == DELETE:
            config = await _config(bus)
            await _call(bus, f"STREAM.DELETE.{WORK_STREAM}")
            await _until_restored(bus, config)
        case _ if action == PURGE:
            await _call(bus, f"STREAM.PURGE.{WORK_STREAM}")
        case _ if action == EDIT:
            config = await _config(bus)
            await _call(bus, f"STREAM.UPDATE.{WORK_STREAM}", {**config, "max_msgs": 1})
            await _until_restored(bus, config)
        case _ if action == PAUSE:
            names = await _call(bus, f"CONSUMER.NAMES.{WORK_STREAM}")
            for name in names["consumers"] or ():
                await _call(bus, f"CONSUMER.PAUSE.{WORK_STREAM}.{name}", {"pause_until": FAR})
        case _:
            raise ValueError(f"the store has no fault {action}")


def damage_store(broker: Broker) -> None:
    """Kills the broker and cuts off half of the work stream's newest block, before it is started again."""
    blocks = broker.folder.rglob(f"{WORK_STREAM}/msgs/*.blk")
    newest = max(blocks, key=lambda file: int(file.stem))
    os.kill(broker.pid, signal.SIGKILL)
    os.truncate(newest, newest.stat().st_size // 2)


async def _fill(bus: Bus, seconds: float) -> None:
    """Fills the store with a stream of somebody else, and removes that after some time."""
    await _call(bus, f"STREAM.CREATE.{OTHER}", {"name": OTHER, "subjects": ["other"], "storage": "file"})
    size = PIECE
    while size > 64:
        reply = await bus.request("other", bytes(size), timeout=TIMEOUT)
        if b'"error"' in reply.data:
            size //= 4
    await asyncio.sleep(seconds)
    await _call(bus, f"STREAM.DELETE.{OTHER}")


async def _config(bus: Bus) -> dict[str, Any]:
    """Returns the settings of the work stream; empty while there is none."""
    config: dict[str, Any] = (await _call(bus, f"STREAM.INFO.{WORK_STREAM}")).get("config", {})
    return config


async def _until_restored(bus: Bus, config: dict[str, Any]) -> None:
    """Waits until the work stream has the limits of `config` again, which the stack gives it."""
    async with asyncio.timeout(TIMEOUT):
        while (await _config(bus)).get("max_msgs") != config["max_msgs"]:  # noqa: ASYNC110 - the broker does not tell
            await asyncio.sleep(LOOK_INTERVAL)


async def _call(bus: Bus, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    reply = await bus.request(f"$JS.API.{call}", msgspec.json.encode(body or {}), timeout=TIMEOUT)
    answer: dict[str, Any] = msgspec.json.decode(reply.data)
    return answer
