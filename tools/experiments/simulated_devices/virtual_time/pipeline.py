"""The pipeline in virtual time: the scheduler's own policy and the executor's own slot table, driven by events.

No other part of the services runs: `StepTimes` gives the time of a step, and `Host` the time of everything around it.
Every figure from here is simulated.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pagewire.bench._common.loads import Request
from pagewire.services.executor.devices.protocol import Bool, Capacity, Int64
from pagewire.services.executor.devices.sim.device import choices
from pagewire.services.executor.steps.in_flight_step import OutputColumns
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import NO_TOKEN, StepOutput
from pagewire.shared.messages.work import Sampling
from tools.experiments.simulated_devices.virtual_time.clock import Clock
from tools.experiments.simulated_devices.virtual_time.waste import Waste

_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Host:
    """Times of the pipeline around the device, in seconds. The first four are measured, the last two assumed."""

    step: float = 120e-6
    """Time of the step thread per step: to apply plans, compose and launch, collect tokens and hand them on."""
    step_row: float = 0.7e-6
    """Time of the step thread per row."""
    schedule: float = 30e-6
    """Time of the scheduler per message that it reads."""
    schedule_row: float = 2.2e-6
    """Time of the scheduler per row of a step output."""
    round_trip: float = 500e-6
    """Way of a plan to the executor and of a step output back, over the broker."""
    edge: float = 3e-3
    """Way of a request from its client to the scheduler and of a token back."""
    asynchronous: bool = True
    """Asynchronous output: the thread prepares the next step while the device runs the one before."""


@dataclass(slots=True)
class Trace:
    """Results of a run."""

    requests: list[Request] = field(default_factory=list)
    """Requests in the order of their ends."""
    busy: float = 0.0
    """Seconds in which the device ran steps."""
    moved: float = 0.0
    """Bytes of weights and KV cache that the steps read and wrote."""
    working: float = 0.0
    """Seconds in which there was a request."""
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    waste: Waste = field(default_factory=Waste)


class StepTimes(Protocol):
    """Durations of a device's steps, by the columns [R] of a `StepBatch`, such as `Roofline`."""

    def seconds(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns the seconds of a step."""

    def moved(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns the bytes of weights and KV cache that a step reads and writes."""


Then = Callable[[Request], Request | None]
"""Returns the next request of a client whose request has ended, if it sends one."""


def one_after_another(waiting: list[Request]) -> Then:
    """Has a client whose request has ended send the last one of `waiting`, which is removed there."""

    def following(ended: Request) -> Request | None:
        request = waiting.pop() if waiting else None
        if request is not None:
            request.at = ended.tokens_at[-1]
        return request

    return following


class VirtualPipeline:
    """One scheduler and one executor. Use once.

    Attributes:
        policy: the scheduler's.
        then: called when a request has ended.
        read: called when the scheduler has read a step output.
    """

    def __init__(
        self,
        limits: TermLimits,
        times: StepTimes,
        host: Host,
        table: type[SlotTable],
        longest: int,
        clock: Clock | None = None,
    ) -> None:
        """`table` composes the steps, `longest` is the longest sequence in tokens; pipelines may share a `clock`."""
        capacity = Capacity(limits.num_blocks, limits.block_size, limits.max_num_seqs, longest, _VOCABULARY)
        self.policy = Policy(1, limits)
        self._table = table(capacity)
        self._times = times
        self._host = host
        self._clock = clock or Clock()
        self._requests: dict[int, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._outstanding = 0
        self._working_since = 0.0
        self.then: Then = _stop
        self.read: Callable[[], None] = _ignore
        self._scheduler_free = 0.0
        self._inbox: list[Plan] = []
        self._plan = self._lease_until = self._runs = self._step = 0
        self._ends: deque[float] = deque([0.0], maxlen=2)  # of the last two steps, the latest last
        self._in_flight: deque[StepOutput] = deque()  # of steps that are launched and have not ended
        self._idle = True
        self.trace = Trace()

    def run(self, requests: Iterable[Request], then: Then | None = None) -> Trace:
        """Serves `requests`, and the requests that `then` returns whenever one has ended, to the last."""
        self.then = then or _stop
        for request in requests:
            self._send(request)
        self._clock.run()
        return self.finish()

    def finish(self) -> Trace:
        """Returns the results, once the clock has no actions left."""
        if self._outstanding:
            raise RuntimeError(f"{self._outstanding} requests never ended")
        self.trace.preemptions = self.policy.preemptions
        return self.trace

    def _send(self, request: Request) -> None:
        self._clock.at(request.at, self.expect)
        self._clock.at(request.at + self._host.edge / 2, self.arrive, request)

    def expect(self) -> None:
        """Counts a request that is on its way here."""
        if not self._outstanding:
            self._working_since = self._clock.now
        self._outstanding += 1

    def arrive(self, request: Request) -> Sequence:
        """Adds a request to the scheduler's policy."""
        number = len(self._requests) + 1
        self._requests[number] = request
        sampling = Sampling(request.output, seed=number)
        prompt = unpack(pack(request.prompt))  # read at this moment, as from a work item
        sequence = Sequence(number, prompt, len(prompt), sampling, arrival_order=number)
        self._sequences[number] = sequence
        self.policy.add(sequence)
        self._schedule(0)
        return sequence

    def _read(self, output: StepOutput) -> None:
        """Passes a step output to the policy."""
        self.policy.on_step(output)
        self._schedule(len(output.finishes))
        self.read()

    def _schedule(self, rows: int) -> None:
        """Sends the policy's plans after the time that they take: the scheduler handles one message after the other."""
        began = max(self._clock.now, self._scheduler_free)
        self._scheduler_free = began + self._host.schedule + rows * self._host.schedule_row
        while (plan := self.policy.schedule(now=0.0, slowest_reader=None).plan) is not None:
            self._clock.at(self._scheduler_free + self._host.round_trip / 2, self._receive, plan)

    def _receive(self, plan: Plan) -> None:
        self._inbox.append(plan)
        if self._idle:
            self._idle = False
            self._clock.at(self._clock.now, self._boundary)

    def _boundary(self) -> None:
        """Applies plans and runs the next step, as the step loop does."""
        plans, self._inbox = self._inbox, []
        for plan in plans:
            self._table.apply(plan)
            self._plan, self._lease_until = plan.number, plan.lease_until
        step = self._table.launch() if self._runs < self._lease_until else None
        if step is None:
            self._idle = True
            if plans:
                self._clock.at(max(self._clock.now, self._ends[-1]), self._emit, self._output(OutputColumns(), 0.0))
            return
        self._runs += 1
        batch = step.batch
        rows = len(batch.slots)
        positions = batch.num_computed_tokens + batch.query_lens
        # Tokens are known as soon as a step is composed: of what follows, only their times are to be found out.
        picked = choices(batch.slots.astype(np.uint64), positions, _VOCABULARY)
        columns = self._table.record(step, np.where(batch.samples, picked, -1))
        work = self._host.step + rows * self._host.step_row
        seconds = self._times.seconds(batch.num_computed_tokens, batch.query_lens, batch.samples)
        self.trace.moved += self._times.moved(batch.num_computed_tokens, batch.query_lens, batch.samples)
        self._ends.append(max(self._clock.now + work, self._ends[-1]) + seconds)
        self.trace.busy += seconds
        self.trace.steps += 1
        self.trace.rows += rows
        self._in_flight.append(self._output(columns, seconds))
        self._clock.at(self._ends[-1], self._emit, self._in_flight[-1])
        queued = self._clock.now + work
        self._clock.at(max(queued, self._ends[0]) if self._host.asynchronous else self._ends[-1], self._boundary)

    def _output(self, columns: OutputColumns, seconds: float) -> StepOutput:
        output = StepOutput(1, self._step, self._plan, *columns[:5], elapsed_us=round(seconds * 1e6))
        self._step += 1
        return output

    def _emit(self, output: StepOutput) -> None:
        """Sends the tokens of a step that has ended to the clients, and its output to the scheduler."""
        at = self._clock.now + self._host.edge / 2
        rows = zip(unpack(output.sequences), unpack(output.tokens), output.finishes, strict=True)
        for sequence, token, finish in rows:
            if token == NO_TOKEN:
                continue
            request = self._requests[sequence]
            request.tokens.append(token)
            request.tokens_at.append(at)
            if finish:
                request.cached = self._sequences.pop(sequence).num_cached_tokens or 0
                self._clock.at(at, self._end, request)
        if output.sequences:
            self._in_flight.popleft()
        self.trace.waste.sample(self.policy, output, self._in_flight[0] if self._in_flight else None)
        self._clock.at(self._clock.now + self._host.round_trip / 2, self._read, output)

    def _end(self, request: Request) -> None:
        self._outstanding -= 1
        if not self._outstanding:
            self.trace.working += self._clock.now - self._working_since
        self.trace.requests.append(request)
        following = self.then(request)
        if following is not None:
            self._send(following)


def _stop(_: Request) -> None:
    return None


def _ignore() -> None:
    return None
