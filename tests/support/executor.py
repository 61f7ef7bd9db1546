"""An executor without a model: it obeys plans to the letter and notices every KV position that is not as it should be.

A block position holds a fingerprint of the whole token prefix that it was computed from, so a block that was shared too
early, reused too early or never written shows as a wrong fingerprint when it is read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagewire.services.executor.devices.protocol import Float32
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.splitfuse import PendingTokens, compose

VOCABULARY = 50


def next_token(tokens: list[int]) -> int:
    """Returns the token that follows `tokens`: a function of all of them."""
    return hash(tuple(tokens)) % VOCABULARY


def next_logprobs(tokens: list[int]) -> Float32:
    """[VOCABULARY] log-probabilities of what follows `tokens`: a function of all of them."""
    drawn = np.random.default_rng(hash(tuple(tokens)) & 0xFFFF_FFFF).normal(size=VOCABULARY)
    logprobs: Float32 = (drawn - np.log(np.exp(drawn).sum())).astype(np.float32)
    return logprobs


def generate(prompt: list[int], max_tokens: int, stop_ids: list[int]) -> list[int]:
    """All tokens that must follow `prompt`, however they are scheduled."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Slot:
    sequence: int
    tokens: list[int]
    end: int
    stop_ids: list[int]
    blocks: list[int]
    computed: int
    limit: int
    candidates: int = 0
    dead: bool = False


@dataclass(slots=True)
class ModelExecutor:
    """`plans` and `outputs` are the wires: the test decides when either end reads."""

    num_blocks: int
    block_size: int
    windows: tuple[int, ...] = (0,)
    """Per group of layers, as in `TermLimits`."""
    plans: deque[Plan] = field(default_factory=deque)
    outputs: deque[StepOutput] = field(default_factory=deque)
    slots: dict[int, Slot] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    """By block and offset."""
    term: int = 0
    plan: int = 0
    step: int = 0
    budget: int = 0
    lease_until: int = 0
    runs: int = 0
    """Steps with rows, which the lease counts."""
    widest: int = 0
    """Largest number of tokens in a step."""
    most: int = 1
    """Tokens that a row samples at most. Above 1, it samples any number of them, or none at all."""

    def run(self) -> bool:
        """One turn of the step loop: applies the plans that have arrived, then steps or answers. False when idle."""
        applied = bool(self.plans)
        while self.plans:
            self._apply(self.plans.popleft())
        live = [i for i in self.order if not self.slots[i].dead]
        slots = [self.slots[i] for i in live]
        columns = compose(
            PendingTokens(
                np.array(live, np.int64),
                np.array([len(s.tokens) - s.computed for s in slots], np.int64),
                np.array([s.limit - s.computed for s in slots], np.int64),
            ),
            self.budget,
        )
        rows = [(self.slots[i], width) for i, width in zip(*(c.tolist() for c in columns), strict=True)]
        if rows and self.runs < self.lease_until:
            self.runs += 1
            self._step(rows)
        elif applied:
            self._emit([])
        else:
            return False
        return True

    def _apply(self, plan: Plan) -> None:
        assert plan.number == self.plan + 1
        self.term, self.plan, self.budget, self.lease_until = plan.term, plan.number, plan.budget, plan.lease_until
        pairs = unpack(plan.copies)
        for copied, target in zip(pairs[::2], pairs[1::2], strict=True):
            assert target not in pairs[::2]
            for offset in range(self.block_size):
                self.kv[target, offset] = self.kv.get((copied, offset), 0)
        sources = {fork.source: self.slots[fork.source] for fork in plan.forks}
        for slot in unpack(plan.removed):
            del self.slots[slot]
        for added in plan.added:
            assert added.slot not in self.slots
            tokens = unpack(added.tokens)
            assert added.computed < len(tokens)
            self.slots[added.slot] = Slot(
                added.sequence,
                tokens,
                added.prompt_tokens + added.sampling.max_tokens,
                unpack(added.sampling.stop_ids),
                unpack(added.blocks),
                added.computed,
                added.limit,
                added.sampling.candidates,
            )
        for fork in plan.forks:
            assert fork.slot not in self.slots
            source = sources[fork.source]
            assert fork.computed <= source.computed
            tokens = source.tokens[: fork.computed] + unpack(fork.tokens)
            assert fork.computed < len(tokens)
            self.slots[fork.slot] = Slot(
                fork.sequence,
                tokens,
                source.end,
                source.stop_ids,
                unpack(fork.blocks),
                fork.computed,
                fork.limit,
                source.candidates,
            )
        entries, width = unpack(plan.blocks), 1 + len(self.windows)
        assert len(entries) % width == 0
        for i in range(0, len(entries), width):
            slot, *blocks = entries[i : i + width]
            assert all(0 <= block < self.num_blocks for block in blocks)
            self.slots[slot].blocks += blocks
        pairs = unpack(plan.limits)
        for slot, limit in zip(pairs[::2], pairs[1::2], strict=True):
            self.slots[slot].limit = limit
        named = unpack(plan.order)
        assert len(set(named)) == len(named)
        assert set(named) <= self.slots.keys()
        held = [slot for slot in self.order if slot in self.slots]
        self.order = list(dict.fromkeys([*named, *held, *self.slots]))
        for entry in self.slots.values():
            assert entry.limit <= len(entry.blocks) // len(self.windows) * self.block_size

    def _step(self, rows: list[tuple[Slot, int]]) -> None:
        self.widest = max(self.widest, sum(width for _, width in rows))
        done = []
        for slot, width in rows:
            start = slot.computed
            for position in range(start, start + width):
                for group, block in enumerate(self.blocks_at(slot, position)):
                    self.kv[block, position % self.block_size] = hash((group, *slot.tokens[: position + 1]))
            slot.computed += width
            done.append((slot, start, width))
        # All writes of a step come before its reads, as in a layer of a model.
        columns = []
        candidates: list[tuple[int, list[int], list[float]]] = []
        for slot, start, width in done:
            for position in range(slot.computed):
                for group, block in enumerate(self.blocks_at(slot, position)):
                    if not self.windows[group] or position > start - self.windows[group]:
                        cached = self.kv.get((block, position % self.block_size))
                        assert cached == hash((group, *slot.tokens[: position + 1])), "a row read another sequence's KV"
            sampled: list[int] = []
            finish = Finish.NONE
            if slot.computed == len(slot.tokens):
                if slot.candidates:
                    row = next_logprobs(slot.tokens)
                    best = np.argsort(-row, kind="stable")[: slot.candidates]
                    candidates.append((slot.sequence, best.tolist(), row[best].tolist()))
                count = 1 if self.most == 1 or slot.candidates else hash((self.step, slot.computed)) % (self.most + 1)
                while len(sampled) < count and not finish:
                    sampled.append(next_token(slot.tokens))
                    slot.tokens.append(sampled[-1])
                    if sampled[-1] in slot.stop_ids:
                        finish = Finish.STOP
                    elif len(slot.tokens) == slot.end:
                        finish = Finish.LENGTH
                slot.dead = finish != Finish.NONE
                slot.computed -= not count  # the last position is computed again
            columns.append((slot.sequence, start, width, sampled, finish))
        self._emit(columns, candidates)

    def blocks_at(self, slot: Slot, position: int) -> list[int]:
        """The block of each group that holds a position."""
        first = position // self.block_size * len(self.windows)
        return slot.blocks[first : first + len(self.windows)]

    def _emit(
        self,
        columns: list[tuple[int, int, int, list[int], Finish]],
        candidates: Sequence[tuple[int, list[int], list[float]]] = (),
    ) -> None:
        self.outputs.append(
            StepOutput(
                term=self.term,
                step=self.step,
                plan=self.plan,
                sequences=pack(c[0] for c in columns),
                starts=pack(c[1] for c in columns),
                counts=pack(c[2] for c in columns),
                tokens=pack(token for c in columns for token in (c[3] or ([NO_TOKEN] if self.most == 1 else []))),
                finishes=bytes(c[4] for c in columns),
                elapsed_us=0,
                candidate_counts=pack(number for sequence, ids, _ in candidates for number in (sequence, len(ids))),
                candidates=pack(token for _, ids, _ in candidates for token in ids),
                logprobs=np.array([value for _, _, values in candidates for value in values], "<f4").tobytes(),
                token_counts=pack(len(c[3]) for c in columns) if self.most > 1 else b"",
            )
        )
        self.step += 1
