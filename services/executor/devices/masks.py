"""Which tokens the grammars of sequences allow next: a bit per token, computed while the device runs the forward."""

from collections.abc import Sequence
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

    def fill(self, slots: Int64, *, drafted: bool = False) -> None:
        """Computes the masks of the `slots` [R] that have a grammar, maybe beyond `drafted` tokens. Releases the
        interpreter lock meanwhile."""
        self._compute(slots, drafted=drafted)

    def report_limit(self, slot: int) -> None:
        """Has the grammar of a slot say so if it is beyond a limit."""
        self._compute(np.array([slot]), drafted=False)

    def _compute(self, slots: Int64, *, drafted: bool) -> None:
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
            grammar.complete(table[slot], drafted=drafted)

    def along(self, slots: Int64, drafts: Sequence[Sequence[int]]) -> UInt32:
        """Returns the masks [P, ceil(vocabulary / 32)] of the `slots` [R], which have a grammar: of each slot those
        before its drafted tokens, one after the other, and behind the last of them."""
        masks: list[list[UInt32]] = [[] for _ in drafts]
        some = list(range(len(drafts)))
        while some:
            self.fill(slots[some], drafted=bool(masks[some[0]]))
            for row in some:
                masks[row].append(self.table[slots[row]].copy())
            some = [row for row in some if len(masks[row]) <= len(drafts[row])]
            for row in some:
                if (grammar := self._grammars[slots[row]]) is not None:
                    grammar.sampled(drafts[row][len(masks[row]) - 1])
        for slot, tokens in zip(slots.tolist(), drafts, strict=True):
            if tokens and (grammar := self._grammars[slot]) is not None:
                grammar.undo(len(tokens))
        return np.stack([mask for row in masks for mask in row])

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
