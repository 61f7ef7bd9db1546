"""Copies sampled ids from the device to the host, on a second stream, while the next step computes."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime
from pagewire.services.executor.devices.protocol import Int64


class Pending:
    """A launched step: see `Device.launch`."""

    candidates = None
    """This device reports no candidates."""

    def __init__(self, ring: "OutputRing", tokens: Tensor, began: Moment, ended: Moment, arrived: Moment) -> None:
        self._ring = ring
        self._tokens = tokens
        self._began, self._ended, self._arrived = began, ended, arrived

    def wait(self) -> Int64:
        """Waits until the step has ended and returns the token of each row [R], or -1 where the row sampled none.

        Raises:
            RuntimeError: an earlier step was not waited for yet, or this one was already.
        """
        self._ring.finish(self)
        self._arrived.wait()
        self._ring.busy += self._ended.reached() - self._began.reached()
        return self._tokens.numpy().astype(np.int64)


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

    def send(self, tokens: Tensor, began: Moment) -> Pending:
        """Enqueues the copy of `tokens` int32 [R] to the host, for the step that was enqueued after `began`.

        Raises:
            RuntimeError: `depth` steps are in flight.
        """
        if len(self._pending) == len(self._host):
            raise RuntimeError(f"{len(self._pending)} steps are in flight: wait for the oldest first")
        index, rows = self._next, len(tokens)
        kept = self._device[index, :rows]
        kept.copy_(tokens)  # the next step overwrites `tokens`
        ended = self._runtime.mark()
        arrived = self._runtime.copy_out(kept, self._host[index, :rows])
        self._next = (index + 1) % len(self._host)
        self._pending.append(Pending(self, self._host[index, :rows], began, ended, arrived))
        return self._pending[-1]

    def finish(self, pending: Pending) -> None:
        """Removes a step. Called by `Pending.wait`."""
        if not self._pending or self._pending[0] is not pending:
            raise RuntimeError("steps are waited for once and in order")
        self._pending.popleft()
