"""Beam searches as sequences: each beam takes a slot, pauses at an exact position, and is forked into the next beams.

A paused beam has reported its candidates, so nothing is lost when it is evicted: its children are computed anew. Beams
of a search that has begun go before all other waiting sequences. So two searches never wait for each other, and a
search ends even in a pool that holds only one of its beams.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any

import msgspec
import numpy as np

from pagewire.services.scheduler.policy.beam_search.fork_blocks import fork_blocks
from pagewire.services.scheduler.policy.beam_search.ranking import BeamSearch, Candidates
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.services.scheduler.policy.sequence_table import SequenceTable
from pagewire.services.scheduler.policy.waiting_queue import rank
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import Fork
from pagewire.shared.messages.step import StepOutput

FIRST_BEAM = 1 << 31
"""Ids of beams begin here, and those of choices lie below. Only the executor and the scheduler know beams."""


@dataclass(slots=True, eq=False, kw_only=True)
class Beam(Sequence):
    """The sequence of one beam in one round. It runs up to its position limit, reports its candidates and pauses."""

    group: "BeamGroup"
    index: int = 0
    """Place of the beam in its round."""

    @property
    def caller_ids(self) -> tuple[int, ...]:
        """Ids of the choices of its search."""
        return tuple(choice.id for choice in self.group.choices)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One beam search on its way through the executor."""

    choices: Many[Sequence]
    """The completions to be found, best first. They never run."""
    search: BeamSearch
    beams: list[Beam] = field(default_factory=list)
    """Beams of the present round."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Candidates of the present round, by index of the beam that has reported them."""


class BeamScheduler:
    """The beam searches of a term that have begun and not ended. Its length is their number."""

    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._active: dict[int, BeamGroup] = {}  # by id of the first choice
        self._complete: list[BeamGroup] = []  # all beams have reported
        self._failed: list[BeamGroup] = []  # a beam ended with an error
        self._ids = count(FIRST_BEAM + 1)

    def __len__(self) -> int:
        return len(self._active)

    @property
    def is_idle(self) -> bool:
        """Whether no search is active, and `fork` has returned all that have ended."""
        return not (self._active or self._failed)

    def add(self, choices: Many[Sequence]) -> None:
        """Begins a search for `choices`, completions of one prompt. The id of the first one is that of the search."""
        first, sampling = choices[0], choices[0].sampling
        search = BeamSearch(
            sampling.beam_width,
            sampling.max_tokens,
            sampling.length_penalty,
            unpack(sampling.stop_ids),
            min_tokens=sampling.min_tokens,
            num_logprobs=sampling.logprobs,
        )
        group = self._active[first.id] = BeamGroup(choices, search)
        inherited: dict[str, Any] = {each.name: getattr(first, each.name) for each in fields(first)}
        beam = Beam(**inherited, group=group)
        beam.id, beam.tokens = next(self._ids), list(first.tokens)
        beam.blocks, beam.stamps, beam.given_back = [], [], []
        beam.position_limit = len(beam.tokens)
        # The search decides where a text ends: on the device the beam goes on with any token. The log-probabilities of
        # the chosen tokens come from the candidates.
        beam.sampling = msgspec.structs.replace(
            sampling, stop_ids=b"", max_tokens=sampling.max_tokens + 1, min_tokens=0, logprobs=-1
        )
        group.beams.append(beam)
        self._sequences.add(beam)

    def abort(self, search: int) -> bool:
        """Ends a search; returns whether there was one with that id."""
        group = self._active.pop(search, None)
        for beam in group.beams if group is not None else ():
            self._sequences.abort(beam.id)
        return group is not None

    def fail(self, sequence: Sequence) -> None:
        """Ends the search of a beam that ended with an error; does nothing for another sequence."""
        if isinstance(sequence, Beam):
            group = sequence.group
            self.abort(group.choices[0].id)
            for choice in group.choices:
                choice.finish, choice.state = sequence.finish, SequenceState.FINISHED
            self._failed.append(group)

    def receive(self, output: StepOutput) -> None:
        """Records the candidates that a step has reported."""
        tokens, logprobs = unpack(output.candidates), np.frombuffer(output.logprobs, "<f4")
        pairs = iter(unpack(output.candidate_counts))
        begin = 0
        for i, num_candidates in zip(pairs, pairs, strict=True):
            end = begin + num_candidates
            beam = self._sequences.by_id.get(i)
            if isinstance(beam, Beam) and not beam.at_limit:
                beam.at_limit = True
                group = beam.group
                group.candidates[beam.index] = Candidates(tokens[begin:end], logprobs[begin:end])
                if len(group.candidates) == len(group.beams):
                    self._complete.append(group)
            begin = end

    def fork(self, num_steps: int) -> tuple[list[Fork], list[int], list[BeamGroup]]:
        """Replaces the beams of each search whose beams have all reported by those of the next round.

        A beam for which there is no slot or block, or whose parent was evicted or preempted, waits and is computed
        anew. Returns the forks of the next plan, pairs of blocks that the device must copy for them, and the searches
        that have ended since the last call.
        """
        sequences = self._sequences
        forks: list[Fork] = []
        copies: list[int] = []
        ended, self._failed = self._failed, []
        complete, self._complete = self._complete, []
        for group in complete:
            if group.choices[0].id not in self._active:
                continue  # it was aborted
            parents, pairs = group.beams, self._advance(group)
            if not group.beams:
                ended.append(group)
            slots = {parent.id: parent.slot for parent in parents}
            kept = {parent.id for _, parent in pairs}
            for parent in parents:
                if parent.id not in kept:
                    sequences.finish(parent)
            alive = [(child, parent) for child, parent in pairs if parent.state is SequenceState.RUNNING]
            num_slots = sequences.num_free_slots + sum(p.state is SequenceState.RUNNING for p in parents)
            forked, copied = fork_blocks(sequences, alive, num_slots)
            copies += copied
            for parent in parents:
                sequences.finish(parent)
            for child, source in forked:
                sequences.assign_slot(child, num_steps)
                sequences.give_back(child)
                position, blocks = child.num_computed_tokens, pack(child.blocks)
                tokens, slot = pack(child.tokens[position:]), slots[source.id]
                forks.append(Fork(child.slot, child.id, slot, position, tokens, blocks, child.position_limit))
            for child in group.beams:
                sequences.by_id[child.id] = child
                if child.state is SequenceState.WAITING:
                    sequences.waiting.prepend(child)
        return forks, copies, ended

    def evict(self, sequence: Sequence) -> bool:
        """Frees the youngest paused beam at once, unless it is older than `sequence`; returns whether there was one.

        So a beam that waits for others holds nothing that an older sequence needs.
        """
        paused = (beam for beam in reversed(self._sequences.running) if beam.at_limit) if self._active else iter(())
        beam = next(paused, None)
        if beam is None or rank(beam) < rank(sequence):
            return False
        self._sequences.finish(beam)
        return True

    def _advance(self, group: BeamGroup) -> list[tuple[Beam, Beam]]:
        """Runs one round of a search; returns its next beams, each with its parent, or none if it has ended."""
        parents = group.beams
        continuations = group.search.advance([group.candidates[i] for i in range(len(parents))])
        group.candidates = {}
        group.beams = [
            replace(
                parents[parent],
                id=next(self._ids),
                tokens=[*parents[parent].tokens[: parents[parent].position_limit], token],
                position_limit=parents[parent].position_limit + 1,
                index=index,
                at_limit=False,
                state=SequenceState.WAITING,
                slot=-1,
                blocks=[],
                stamps=[],
                given_back=[],
                num_computed_tokens=0,
                num_cached_tokens=0,
            )
            for index, (parent, token) in enumerate(continuations)
        ]
        if not continuations:
            for choice, hypothesis in zip(group.choices, group.search.finished, strict=False):
                choice.tokens += hypothesis.tokens
                choice.reported = list(hypothesis.reported)
                choice.cumulative_logprob = float(hypothesis.cumulative_logprob)
                choice.finish, choice.state = hypothesis.finish, SequenceState.FINISHED
            del self._active[group.choices[0].id]
        return [(child, parents[parent]) for child, (parent, _) in zip(group.beams, continuations, strict=True)]
