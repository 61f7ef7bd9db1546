"""Copies sampled ids from the device to the host, on a second stream, while the next step computes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.candidates import unpack_candidates
from pagewire.services.executor.devices.cuda.drafted_tokens import DraftedTokens
from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime
from pagewire.services.executor.devices.logprobs import join_logprobs, unpack_logprobs
from pagewire.services.executor.devices.protocol import Bool, Candidates, Int64, Logprobs
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar

CheckTokens = Callable[[Int64], None]
"""Is called with the tokens [R] of each step when they have arrived, in order. Raises DeviceLost if they are wrong."""


class Report(NamedTuple):
    """Log-probabilities or candidates of some tokens of a step, on their way to the host."""

    rows: Int64
    """[M] row in the batch of each token."""
    places: Int64
    """[M] place of the step that has sampled each token; of a prompt's token, nothing."""
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

    def __init__(
        self,
        ring: "OutputRing",
        tokens: Tensor,
        began: Moment,
        ended: Moment,
        arrived: Moment,
        reports: Reports,
        forced: Mapping[int, Sequence[int]],
        drafted: DraftedTokens | None,
    ) -> None:
        """`reports` are in pinned memory, to which they are copied before `arrived`."""
        self._ring = ring
        self._tokens = tokens
        self._ids: Int64 | None = None
        self._began, self._ended, self._arrived = began, ended, arrived
        self._reports = reports
        self._drafted = drafted
        self._grammars: Mapping[int, SequenceGrammar] = {}
        self.forced = forced
        self.token_counts: Int64 | None = None
        self.candidates: Candidates | None = None
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None

    def tell(self, grammars: Mapping[int, SequenceGrammar]) -> None:
        """Has `grammars`, by row of a step without drafts, follow the tokens as soon as they are known."""
        self._grammars = grammars

    def tokens(self) -> Int64:
        """Waits until the step has ended and returns the token of each of its places, before or after `wait`.

        Raises:
            DeviceLost: the tokens are wrong.
        """
        if self._ids is None:
            self._arrived.wait()
            ids = self._tokens.numpy().astype(np.int64)
            self._ring.check_tokens(ids)
            self._ids = ids
            for row, grammar in self._grammars.items():
                if ids[row] >= 0:
                    grammar.sampled(int(ids[row]))
        return self._ids

    def wait(self) -> Int64:
        """Waits until the step has ended and returns its tokens.

        Raises:
            RuntimeError: an earlier step was not waited for yet, or this one was already.
        """
        self._ring.finish(self)
        tokens = self.tokens()
        kept = tokens >= 0
        if self._drafted is not None:
            tokens, self.token_counts, kept = self._drafted.read(tokens)
        self._ring.busy += self._ended.seconds_since(self._began)
        sampled, prompts, candidates = self._reports
        self.logprobs = join_logprobs([_logprobs(report, kept[report.places]) for report in sampled])
        self.prompt_logprobs = join_logprobs([_logprobs(report) for report in prompts])
        for report in candidates:
            self.candidates = unpack_candidates(report.reduced.numpy(), report.rows, report.counts)
        return tokens


def _logprobs(report: Report, kept: Bool | slice = slice(None)) -> Logprobs:
    columns = report.rows[kept], report.positions[kept], report.counts[kept]
    return unpack_logprobs(report.reduced.numpy()[kept], *columns)


class OutputRing:
    """Buffers for the ids of `depth` steps of up to `places` places, on the device and in pinned memory.

    Attributes:
        busy: seconds on the device of all steps that were waited for.
        check_tokens: checks the tokens of each step.
    """

    def __init__(self, runtime: Runtime, depth: int, places: int, check_tokens: CheckTokens | None = None) -> None:
        self.busy = 0.0
        self.check_tokens = check_tokens or (lambda _: None)
        self._runtime = runtime
        self._device = torch.zeros(depth, places, dtype=torch.int32, device=runtime.device)
        self._host = runtime.pinned(depth, places)
        self._pending: deque[PendingCopy] = deque()
        self._next = 0

    def send(
        self,
        tokens: Tensor,
        began: Moment,
        reports: Reports = NOTHING,
        forced: Mapping[int, Sequence[int]] = MappingProxyType({}),
        drafted: DraftedTokens | None = None,
    ) -> PendingCopy:
        """Enqueues the copy of `tokens` int32 [P] and of `reports` to the host, for the step enqueued after `began`.

        `forced` is on the host already: see `PendingStep.forced`. `drafted` reads the tokens of a step with drafts.

        Raises:
            RuntimeError: `depth` steps are in flight.
        """
        if len(self._pending) == len(self._host):
            raise RuntimeError(f"{len(self._pending)} steps are in flight: wait for the oldest first")
        index, places = self._next, len(tokens)
        kept = self._device[index, :places]
        kept.copy_(tokens)  # the next step overwrites `tokens`
        ended = self._runtime.mark()
        # Copies follow each other, so that the last one, of the tokens, says that all have arrived.
        copied = Reports(*([self._copy(report) for report in some] for some in reports))
        arrived = self._runtime.copy_out(kept, self._host[index, :places])
        self._next = (index + 1) % len(self._host)
        host = self._host[index, :places]
        self._pending.append(PendingCopy(self, host, began, ended, arrived, copied, forced, drafted))
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
