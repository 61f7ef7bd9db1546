"""Which tokens the grammars of sequences allow next: a bit per token, computed while the device runs the forward."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from pagewire.services.executor.devices.protocol import Bool, Capacity, Int64
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar

UInt32 = npt.NDArray[np.uint32]


class Masks:
    """The masks of all slots.

    Attributes:
        table: [slots, ceil(vocabulary / 32)] the mask of each slot's last token: token t is bit t % 32 of word t // 32.
            The masks of slots without a grammar are arbitrary.
        active: [slots] whether a slot's sequence has a grammar.
    """

    def __init__(self, capacity: Capacity, threads: int = 1) -> None:
        """`threads` masks are computed at a time."""
        slots = capacity.max_num_seqs
        self.table: UInt32 = np.zeros((slots, -(-capacity.vocab_size // 32)), np.uint32)
        self.active: Bool = np.zeros(slots, np.bool_)
        self._grammars: list[SequenceGrammar | None] = [None] * slots
        self._num_threads = threads
        self._threads: LLExecutor | None = None
        self._beside = ThreadPoolExecutor(1, "masks")

    def add(self, slot: int, grammar: SequenceGrammar | None) -> None:
        """Puts a sequence into a slot; None: one without a grammar."""
        self._grammars[slot] = grammar
        self.active[slot] = grammar is not None

    def of(self, slot: int) -> SequenceGrammar | None:
        """Returns the grammar of a slot's sequence."""
        return self._grammars[slot]

    def fill(self, slots: Int64) -> None:
        """Computes the masks of the `slots` [R] that have a grammar. Releases the interpreter lock meanwhile."""
        rows, matchers = [], []
        for slot in slots.tolist():
            grammar = self._grammars[slot]
            if grammar is not None:
                rows.append((slot, grammar))
                matcher = grammar.advance()
                if matcher is not None:
                    matchers.append((matcher, slot))
        if self._threads is None:
            self._threads = LLExecutor(self._num_threads)
        table = self.table
        if matchers:
            self._threads.unsafe_compute_mask_ptr(matchers, table.ctypes.data, table.strides[0], len(table))
        for slot, grammar in rows:
            grammar.complete(table[slot])

    def forced(self, slots: Int64) -> dict[int, list[int]]:
        """Adds the tokens that must come next, and returns them by index in `slots` [R], where there are any."""
        texts: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.active[slots]).tolist():
            grammar = self._grammars[slots[row]]
            if grammar is not None and (tokens := grammar.forced()):
                texts[row] = tokens
        return texts

    def start(self, slots: Int64) -> Future[None] | None:
        """Computes the masks of `slots` [R] on another thread; returns None if none of them has a grammar."""
        if not np.count_nonzero(self.active[slots]):
            return None
        return self._beside.submit(self.fill, slots)

    def close(self) -> None:
        """Ends the threads."""
        self._beside.shutdown()
