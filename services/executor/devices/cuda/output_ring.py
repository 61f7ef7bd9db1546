"""Copies sampled ids from the device to the host, on a second stream, while the next step computes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.candidates import unpack_candidates
from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime
from pagewire.services.executor.devices.logprobs import join_logprobs, unpack_logprobs
from pagewire.services.executor.devices.protocol import Bool, Candidates, Int64, Logprobs

CheckTokens = Callable[[Int64], None]
"""Is called with the tokens [R] of each step when they have arrived, in order. Raises DeviceLost if they are wrong."""


class Report(NamedTuple):
    """Log-probabilities or candidates of some tokens of a step, on their way to the host."""

    rows: Int64
    """[M] row in the batch of each token."""
    positions: Int64
    """[M] position of each token in its sequence."""
    counts: Int64
    """[M] number of entries to report of each token."""
    reduced: Tensor
    """Result of `reduce_logprobs` on the device, or of `reduce_candidates`."""


class Reports(NamedTuple):
    """All that a step reports."""

    sampled: Sequence[Report] = ()
    """Log-probabilities of the sampled tokens."""
    prompts: Sequence[Report] = ()
    """Log-probabilities of tokens of prompts."""
    candidates: Sequence[Report] = ()
    """Candidates in the places of sampled tokens: one report at most."""


NOTHING = Reports()


class PendingCopy:
    """A launched step, as the protocol `PendingStep` describes it."""

    token_counts = None
    """Each row samples one token at most."""

    def __init__(
        self,
        ring: "OutputRing",
        tokens: Tensor,
        began: Moment,
        ended: Moment,
        arrived: Moment,
        reports: Reports,
        forced: Mapping[int, Sequence[int]],
    ) -> None:
        """`reports` are in pinned memory, to which they are copied before `arrived`."""
        self._ring = ring
        self._tokens = tokens
        self._ids: Int64 | None = None
        self._began, self._ended, self._arrived = began, ended, arrived
        self._reports = reports
        self.forced = forced
        self.candidates: Candidates | None = None
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None

    def tokens(self) -> Int64:
        """Waits until the step has ended and returns what `wait` returns, before or after `wait`.

        Raises:
            DeviceLost: the tokens are wrong.
        """
        if self._ids is None:
            self._arrived.wait()
            ids = self._tokens.numpy().astype(np.int64)
            self._ring.check_tokens(ids)
            self._ids = ids
        return self._ids

    def wait(self) -> Int64:
        """Waits until the step has ended and returns the token of each row [R], or -1 where the row sampled none.

        Raises:
            RuntimeError: an earlier step was not waited for yet, or this one was already.
        """
        self._ring.finish(self)
        tokens = self.tokens()
        self._ring.busy += self._ended.seconds_since(self._began)
        sampled, prompts, candidates = self._reports
        self.logprobs = join_logprobs([_logprobs(report, tokens[report.rows] >= 0) for report in sampled])
        self.prompt_logprobs = join_logprobs([_logprobs(report) for report in prompts])
        for report in candidates:
            self.candidates = unpack_candidates(report.reduced.numpy(), report.rows, report.counts)
        return tokens


def _logprobs(report: Report, kept: Bool | slice = slice(None)) -> Logprobs:
    columns = report.rows[kept], report.positions[kept], report.counts[kept]
    return unpack_logprobs(report.reduced.numpy()[kept], *columns)


class OutputRing:
    """Buffers for the ids of `depth` steps of up to `rows` rows, on the device and in pinned memory.

    Attributes:
        busy: seconds on the device of all steps that were waited for.
        check_tokens: checks the tokens of each step.
    """

    def __init__(self, runtime: Runtime, depth: int, rows: int, check_tokens: CheckTokens | None = None) -> None:
        self.busy = 0.0
        self.check_tokens = check_tokens or (lambda _: None)
        self._runtime = runtime
        self._device = torch.zeros(depth, rows, dtype=torch.int32, device=runtime.device)
        self._host = runtime.pinned(depth, rows)
        self._pending: deque[PendingCopy] = deque()
        self._next = 0

    def send(
        self,
        tokens: Tensor,
        began: Moment,
        reports: Reports = NOTHING,
        forced: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> PendingCopy:
        """Enqueues the copy of `tokens` int32 [R] and of `reports` to the host, for the step enqueued after `began`.

        `forced` is on the host already: see `PendingStep.forced`.

        Raises:
            RuntimeError: `depth` steps are in flight.
        """
        if len(self._pending) == len(self._host):
            raise RuntimeError(f"{len(self._pending)} steps are in flight: wait for the oldest first")
        index, rows = self._next, len(tokens)
        kept = self._device[index, :rows]
        kept.copy_(tokens)  # the next step overwrites `tokens`
        ended = self._runtime.mark()
        # Copies follow each other, so that the last one, of the tokens, says that all have arrived.
        copied = Reports(*([self._copy(report) for report in some] for some in reports))
        arrived = self._runtime.copy_out(kept, self._host[index, :rows])
        self._next = (index + 1) % len(self._host)
        self._pending.append(PendingCopy(self, self._host[index, :rows], began, ended, arrived, copied, forced))
        return self._pending[-1]

    def _copy(self, report: Report) -> Report:
        host = self._runtime.pinned(*report.reduced.shape)
        self._runtime.copy_out(report.reduced, host)
        return report._replace(reduced=host)

    def finish(self, pending: PendingCopy) -> None:
        """Removes a step. Called by `PendingCopy.wait`."""
        if not self._pending or self._pending[0] is not pending:
            raise RuntimeError("steps are waited for once and in order")
        self._pending.popleft()
