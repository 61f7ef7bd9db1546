"""Copies sampled ids from the device to the host, on a second stream, while the next step computes."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime
from pagewire.services.executor.devices.logprobs import join_logprobs, unpack_logprobs
from pagewire.services.executor.devices.protocol import Bool, Int64, Logprobs


class Report(NamedTuple):
    """What a step reports of some tokens beside their ids, on its way to the host."""

    rows: Int64
    """[M] row in the batch of each token."""
    positions: Int64
    """[M] position of each token in its sequence."""
    counts: Int64
    """[M] entries wanted of each token."""
    reduced: Tensor
    """Result of `reduce_logprobs` on the device."""


class Pending:
    """A launched step: see `Device.launch`."""

    candidates = None
    """This device reports no candidates."""
    token_counts = None
    """Each row samples one token at most."""

    def __init__(
        self,
        ring: "OutputRing",
        tokens: Tensor,
        began: Moment,
        ended: Moment,
        arrived: Moment,
        reports: Sequence[tuple[Report, Tensor]],
        prompt_reports: Sequence[tuple[Report, Tensor]],
    ) -> None:
        """`reports` come with the pinned memory that they are copied to before `arrived`."""
        self._ring = ring
        self._tokens = tokens
        self._found: Int64 | None = None
        self._began, self._ended, self._arrived = began, ended, arrived
        self._reports, self._prompt_reports = reports, prompt_reports
        self.logprobs: Logprobs | None = None
        """See `Pending.logprobs` of the protocol."""
        self.prompt_logprobs: Logprobs | None = None
        """See `Pending.prompt_logprobs` of the protocol."""

    def tokens(self) -> Int64:
        """Waits until the step has ended and returns what `wait` returns, before or after `wait`."""
        if self._found is None:
            self._arrived.wait()
            self._found = self._tokens.numpy().astype(np.int64)
        return self._found

    def wait(self) -> Int64:
        """Waits until the step has ended and returns the token of each row [R], or -1 where the row sampled none.

        Raises:
            RuntimeError: an earlier step was not waited for yet, or this one was already.
        """
        self._ring.finish(self)
        tokens = self.tokens()
        self._ring.busy += self._ended.seconds_since(self._began)
        self.logprobs = join_logprobs(
            [_found(report, host, tokens[report.rows] >= 0) for report, host in self._reports]
        )
        self.prompt_logprobs = join_logprobs([_found(report, host) for report, host in self._prompt_reports])
        return tokens


def _found(report: Report, host: Tensor, kept: Bool | slice = slice(None)) -> Logprobs:
    columns = report.rows[kept], report.positions[kept], report.counts[kept]
    return unpack_logprobs(host.numpy()[kept], *columns)


class OutputRing:
    """Buffers for the ids of `depth` steps of up to `rows` rows, on the device and in pinned memory.

    Attributes:
        busy: seconds on the device of all steps that were waited for.
    """

    def __init__(self, runtime: Runtime, depth: int, rows: int) -> None:
        self.busy = 0.0
        self._runtime = runtime
        self._device = torch.zeros(depth, rows, dtype=torch.int32, device=runtime.device)
        self._host = runtime.pinned(depth, rows)
        self._pending: deque[Pending] = deque()
        self._next = 0

    def send(
        self, tokens: Tensor, began: Moment, reports: Sequence[Report] = (), prompt_reports: Sequence[Report] = ()
    ) -> Pending:
        """Enqueues the copy of `tokens` int32 [R] to the host, for the step that was enqueued after `began`.

        What is reported of the tokens, and of tokens of prompts, is copied too.

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
        copied = [[(report, self._copy(report)) for report in some] for some in (reports, prompt_reports)]
        arrived = self._runtime.copy_out(kept, self._host[index, :rows])
        self._next = (index + 1) % len(self._host)
        self._pending.append(Pending(self, self._host[index, :rows], began, ended, arrived, *copied))
        return self._pending[-1]

    def _copy(self, report: Report) -> Tensor:
        host = self._runtime.pinned(*report.reduced.shape)
        self._runtime.copy_out(report.reduced, host)
        return host

    def finish(self, pending: Pending) -> None:
        """Removes a step. Called by `Pending.wait`."""
        if not self._pending or self._pending[0] is not pending:
            raise RuntimeError("steps are waited for once and in order")
        self._pending.popleft()
