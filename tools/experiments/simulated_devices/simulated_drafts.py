"""Simulates what drafted tokens gain on a GPU: real drafts of real texts, and simulated times of steps.

A small model answers requests of `pagewire bench drafts` on the CPU. Their tokens are then generated again by a
simulated GPU, so many at a time, once without drafts and once with those of method suffix: what is drafted, how much
of it is right, and how many tokens a step verifies comes from the executor's own code. A step takes the time of a
roofline; one with drafts also that of finding them here, and `--host-ms` in which the GPU waits for the host. Prompts
take no time.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pagewire import AsyncClient
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench.drafts import WORKLOADS, Request
from pagewire.bench.shapes import SHAPES
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.services.executor.devices.defaults import DRAFTED_ROWS, MAX_DRAFTS, STEP_DRAFTS
from pagewire.services.executor.devices.protocol import Capacity, Int64
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.services.executor.speculation.drafter import NewSequence
from pagewire.services.executor.speculation.earlier_outputs import EarlierOutputs
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.speculation.text_drafters import SuffixDrafter
from pagewire.shared.sampling_parameters import record
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import SUFFIX_TOKENS, SpeculativeConfig
from pagewire.shared.telemetry import logs

HEADER = "requests, streams | tokens/s without | with drafts | gain | drafted per step | accepted | tokens of a row"
PROMPT = 512
"""Tokens of a step with a prompt, which teaches the executor what positions cost."""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    prompt: int
    """Tokens of the prompt."""
    tokens: list[int]
    """All tokens."""
    salt: str = ""
    """No answer is drafted from one with another salt, such as the same one."""


@dataclass
class Run:
    """Simulated figures of one workload with a number of streams."""

    workload: str
    streams: int
    tokens: int
    seconds_without: float
    seconds_drafting: float
    steps: int
    rows: int
    drafted: int
    accepted: int
    search_ms: float
    """Median time of finding the drafts of a step."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments simulated_drafts", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["code", "json", "chat"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], help="sequences at once")
    parser.add_argument("--answers", type=int, default=64, help="answers of each workload, at most")
    parser.add_argument("--model", default="", help="the model that answers; by default the default model")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b", help="the model that is simulated")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100")
    parser.add_argument("--host-ms", type=float, default=0.5, help="time between two steps, the second with drafts")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    roofline = Roofline(shape_of(SHAPES[options.shape]), GPUS[options.gpu])
    answers = asyncio.run(_answers(options.model, options.workloads, options.answers))
    runs = [
        replayed(name, texts, streams, roofline, options.host_ms / 1000)
        for name, texts in answers.items()
        for streams in options.streams
    ]
    print("\n".join(table(runs)))
    write(options.output, parser.prog, arguments, runs=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per run, in Markdown."""
    rows = (
        f"{run.workload}, {run.streams} | {run.tokens / run.seconds_without:.0f} | "
        f"{run.tokens / run.seconds_drafting:.0f} | {run.seconds_without / run.seconds_drafting:.2f} | "
        f"{run.drafted / run.steps:.1f} | {run.accepted / max(run.drafted, 1):.2f} | {run.tokens / run.rows:.2f}"
        for run in runs
    )
    return markdown(HEADER, rows)


async def _answers(model: str, workloads: Sequence[str], most: int) -> dict[str, list[Text]]:
    """Returns the answers of a model to the requests of each workload."""
    settings = Settings(model=model, device="cpu", nats_port=0, log_level="error", max_model_len=2048)
    async with Stack(settings, PIPELINE) as stack, AsyncClient((await stack.ready()).nats) as client:
        return {
            name: await asyncio.gather(*(_answer(client, each) for each in itertools.islice(WORKLOADS[name](), most)))
            for name in workloads
        }


async def _answer(client: AsyncClient, request: Request) -> Text:
    messages: list[dict[str, Any]] = [{"role": "user", "content": request[0]}]
    result = await client.chat(messages, request[1], return_token_ids=True, timeout=600)
    prompt = result.prompt_token_ids[0] if result.prompt_token_ids else []
    return Text(len(prompt), [*prompt, *result.choices[0].token_ids])


def replayed(workload: str, texts: Sequence[Text], streams: int, roofline: Roofline, host: float) -> Run:
    """Returns the figures of all texts, each at least once, `streams` at a time."""
    count = max(len(texts), 2 * streams)
    queue = [replace(texts[number % len(texts)], salt=str(number // len(texts))) for number in range(count)]
    plain, drafting = Generation(queue, streams, roofline), Generation(queue, streams, roofline, host)
    plain.run()
    drafting.run()
    assert plain.tokens == drafting.tokens
    return Run(
        workload=workload,
        streams=streams,
        tokens=plain.tokens,
        seconds_without=plain.seconds,
        seconds_drafting=drafting.seconds,
        steps=drafting.steps,
        rows=drafting.rows,
        drafted=drafting.speculator.drafted,
        accepted=drafting.speculator.accepted,
        search_ms=1000 * statistics.median(drafting.searches),
    )


class Generation:
    """Generates known texts, so many at a time, on a simulated GPU.

    Attributes:
        seconds: simulated time so far.
        tokens: number of tokens that were generated.
        steps: number of steps.
        rows: number of rows of all steps.
        searches: seconds in which the drafts of each step were found, on this machine.
    """

    def __init__(self, texts: Sequence[Text], streams: int, roofline: Roofline, host: float | None = None) -> None:
        """`host` seconds pass before a step with drafts; None: nothing is drafted."""
        longest = max(len(text.tokens) for text in texts)
        self.seconds, self.tokens, self.steps, self.rows = 0.0, 0, 0, 0
        self.searches: list[float] = []
        self._roofline, self._host = roofline, host
        self._waiting = deque(enumerate(texts))
        self._running: dict[int, Text] = {}
        self._table = np.zeros((streams, longest), np.int64)
        self._known = np.zeros(streams, np.int64)
        self._ends = np.zeros(streams, np.int64)
        capacity = Capacity(
            0,
            16,
            streams,
            longest,
            0,
            max_step_drafts=STEP_DRAFTS,
            max_drafted_step=2048,
            max_drafted_rows=DRAFTED_ROWS,
        )
        config = SpeculativeConfig()
        drafter = SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            EarlierOutputs(config.suffix_decoding_max_cached_requests),
        )
        self.speculator = Speculator(drafter, min(SUFFIX_TOKENS, MAX_DRAFTS), capacity, ahead=True)
        self.speculator.cost.observe(PROMPT, self._step(np.zeros(1, np.int64), np.full(1, PROMPT), 1))

    def run(self) -> None:
        """Generates all texts."""
        free = list(range(len(self._known)))
        while self._waiting or self._running:
            while self._waiting and free:
                self._begin(free.pop(), *self._waiting.popleft())
            self._decode(np.array(sorted(self._running)))
            for slot in [slot for slot in self._running if self._known[slot] == self._ends[slot]]:
                self.speculator.end(slot, self._table[slot, : self._known[slot]])
                del self._running[slot]
                free.append(slot)

    def _begin(self, slot: int, number: int, text: Text) -> None:
        self._running[slot] = text
        self._table[slot, : len(text.tokens)] = text.tokens
        self._known[slot], self._ends[slot] = text.prompt, len(text.tokens)
        self.speculator.begin(slot, NewSequence(record(), text.prompt, text.salt), (), None)

    def _decode(self, slots: Int64) -> None:
        known, counts = self._known[slots], np.zeros(len(slots), np.int64)
        drafts: Sequence[Sequence[int]] = [()] * len(slots)
        began = time.thread_time()
        if self._host is not None:
            room = self._ends[slots] - known - 1
            drafts = self.speculator.draft_rows(slots, known, room, self._table, len(slots))
            counts[:] = [len(tokens) for tokens in drafts]
        search = time.thread_time() - began
        self.searches.append(search)
        seconds = self._step(known - 1, 1 + counts, len(slots) + int(counts.sum()))
        self.speculator.cost.observe(len(slots) + int(counts.sum()), seconds)
        # The next step is prepared while the GPU computes, but for one with drafts.
        self.seconds += seconds + (search + self._host if self._host is not None and counts.any() else 0.0)
        self.steps += 1
        self.rows += len(slots)
        for slot, begin, tokens in zip(slots.tolist(), known.tolist(), drafts, strict=True):
            right = self._table[slot, begin : begin + len(tokens)] == tokens
            accepted = int(np.argmin([*right, False]))
            self._known[slot] += accepted + 1
            self.tokens += accepted + 1
            if tokens:
                self.speculator.observe(slot, len(tokens), accepted)

    def _step(self, computed: Int64, query_lens: Int64, places: int) -> float:
        return self._roofline.seconds(computed, query_lens, np.ones(places, np.bool_))
