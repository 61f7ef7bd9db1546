"""Measures how soon clients know that an operator, or the disk, has changed the store under their queued requests.

A stack with few slots has many streams open, most of them queued. Then somebody with all rights deletes or purges the
work stream, limits it to one item or pauses its consumers, or the broker is killed and half of the newest block of its
disk is cut off. Each stream must end with the text of an undisturbed run, or with 503; the time until a client is told
503 counts from the change. When all streams have ended, no service may report a problem any more.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._chaos.schedule import DAMAGE, DELETE, EDIT, PAUSE, PURGE
from pagewire.bench._chaos.store_faults import damage_store, disturb_store
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.commands.status import problems
from pagewire.embedded.broker import Broker
from pagewire.embedded.stack import SUPERVISOR, Stack
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import Unavailable
from pagewire.shared.process.discovery import ask
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

CHANGES = (DELETE, PURGE, EDIT, PAUSE, DAMAGE)
SLOTS = 4
TOKENS = 600
"""Tokens of an answer: with few slots, the last of the streams waits for longer than any timer of the store."""
DEADLINE = 120.0
"""Seconds that a request has."""
POLL = 0.02
"""Seconds between two looks at the store."""
REST = 1.0
"""Seconds between two rounds."""
WHOLE_WITHIN = 15.0
"""Seconds after the end of all streams within which no service may report a problem any more."""


@dataclass
class Outcome:
    """Results of one change, over all rounds."""

    change: str
    rounds: int = 0
    exact: int = 0
    delays: list[float] = field(default_factory=list)
    """Seconds from the change until a client was told 503."""
    failures: list[str] = field(default_factory=list)
    """Descriptions of all streams that did not end as they must, and of problems that `pagewire status` still shows."""


def main(arguments: Sequence[str]) -> int:
    """Prints a table; the exit code is 1 if a stream was lost, wrong or hung."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments store_changes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="times that each change is made")
    parser.add_argument("--streams", type=int, default=40, help="streams that are open at a time")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES)
    parser.add_argument("--device", default="sim:h100")
    parser.add_argument("--model", default="", help="default: the default model")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="bench")
    settings = Settings(
        model=options.model, device=options.device, port=0, nats_port=0, max_num_seqs=SLOTS, seed=1, log_level="error"
    )
    outcomes = asyncio.run(measure(settings, options.changes, options.rounds, options.streams))
    raw = [asdict(outcome) for outcome in outcomes]
    print("\n".join(table(raw)))
    for outcome in outcomes:
        print("\n".join(f"{outcome.change}: {text}" for text in outcome.failures))
    write(options.output, parser.prog, arguments, runs=raw)
    return int(any(outcome.failures for outcome in outcomes))


def table(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line per change, in Markdown."""
    lines = []
    for raw in outcomes:
        delays = raw["delays"] or [0.0]
        counts = f"{raw['rounds']} | {raw['exact']} | {len(raw['delays'])} | {len(raw['failures'])}"
        lines.append(f"{raw['change']} | {counts} | {statistics.median(delays):.1f} | {max(delays):.1f}")
    return markdown("change | rounds | exact | told 503 | lost, wrong or hung | told after s, median | longest", lines)


async def measure(settings: Settings, changes: Sequence[str], rounds: int, streams: int) -> list[Outcome]:
    """Makes each change so often, under so many streams."""
    async with Stack(settings) as stack:
        address = await stack.ready()
        user, password = stack.operator
        operator = await nats.connect(
            address.nats,
            name="operator",
            user=user,
            password=password,
            inbox_prefix=subjects.service_inbox(SUPERVISOR),  # services answer its questions
        )
        async with AsyncClient(address.nats) as client:
            expected = await asyncio.gather(*(_text(client, number, asyncio.Event()) for number in range(streams)))
            outcomes = []
            for change in changes:
                outcome = Outcome(change)
                make = partial(_change, change, stack.brokers[0], operator)
                stored = partial(_stored, operator, stack.models)
                for _ in range(rounds):
                    await _round(client, expected, outcome, stored, make)
                    await asyncio.sleep(REST)
                    await stack.ready()
                    outcome.failures += await _problems(operator)
                outcomes.append(outcome)
        await operator.close()
    return outcomes


async def _round(
    client: AsyncClient,
    expected: Sequence[str],
    outcome: Outcome,
    stored: Callable[[Sequence[asyncio.Task[str]]], Awaitable[None]],
    change: Callable[[], Awaitable[None]],
) -> None:
    began = asyncio.Event()
    streams = [asyncio.create_task(_text(client, number, began)) for number in range(len(expected))]
    await began.wait()
    await stored(streams)
    changed_at = time.monotonic()
    end_times: dict[int, float] = {}

    def note(number: int, _: asyncio.Task[str]) -> None:
        end_times[number] = time.monotonic() - changed_at

    for number, stream in enumerate(streams):
        stream.add_done_callback(partial(note, number))
    await change()
    await asyncio.wait(streams)
    outcome.rounds += 1
    for number, stream in enumerate(streams):
        error = stream.exception()
        if isinstance(error, Unavailable):
            outcome.delays.append(end_times[number])
        elif error is not None:
            outcome.failures.append(f"{type(error).__name__}: {error}")
        elif stream.result() != expected[number]:
            outcome.failures.append(f"another text: {stream.result()[-40:]!r}")
        else:
            outcome.exact += 1


async def _text(client: AsyncClient, number: int, began: asyncio.Event) -> str:
    """Returns the text of a stream; sets `began` with its first token.

    Raises:
        PagewireError: it ended with an error.
    """
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number)
    text = ""
    async for delta in client.stream(f"Stream {number}:", sampling, timeout=DEADLINE):
        began.set()
        text += delta.text
    return text


async def _stored(operator: Bus, models: Iterable[str], streams: Sequence[asyncio.Task[str]]) -> None:
    """Waits until the store has the requests of all streams that have not ended."""
    queues = [subjects.all_work(subjects.model_token(name)) for name in models]
    while True:
        lengths = [await operator.store.queue_lengths(queue) for queue in queues]
        if sum(sum(each.items.values()) for each in lengths) >= sum(not stream.done() for stream in streams):
            return
        await asyncio.sleep(POLL)


async def _problems(operator: Bus) -> list[str]:
    """Returns the problems that services report for too long, as `pagewire status` shows them."""
    given_up = time.monotonic() + WHOLE_WITHIN
    while (lines := problems(await ask(operator))) and time.monotonic() < given_up:
        pass
    return [f"the status shows {line}" for line in lines]


async def _change(change: str, broker: Broker, operator: nats.NatsBus) -> None:
    if change != DAMAGE:
        await disturb_store(operator, change, 0.0)
        return
    damage_store(broker)
    await operator.wait_connected()
