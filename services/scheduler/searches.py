"""The beam searches of a term: which sequences are their beams, and who of them has reported."""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pagewire.services.scheduler.beams import BeamSearch, Candidates
from pagewire.services.scheduler.ordering import rank
from pagewire.services.scheduler.sequence import Sequence, State
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import StepOutput

FIRST_BEAM = 1 << 31
"""Ids of beams begin here, those of choices lie below: nobody but the policy hears of a beam."""


@dataclass(slots=True, eq=False)
class Search:
    """A beam search on its way through the executor.

    Each beam is a sequence that runs up to its limit, reports its candidates and stays there. Its blocks and its slot
    are at rest then, so they may be taken or shared at once. When the last one has reported, the next ones are born.
    """

    choices: Many[Sequence]
    """The completions that it is to find, best first. They never run."""
    beams: BeamSearch
    members: list[Sequence]
    """The sequence of each beam."""
    reports: dict[int, Candidates] = field(default_factory=dict)
    """Candidates by number of the beam."""

    @property
    def complete(self) -> bool:
        """Whether all beams have reported."""
        return len(self.reports) == len(self.members)


class Searches:
    """All that have begun and not ended."""

    def __init__(self) -> None:
        self.found: list[Search] = []
        """Those that have ended with a result, for the caller to take."""
        self.stalled: list[Sequence] = []
        """Beams without a slot, by rank. They belong to requests that have begun, so they go before all that wait."""
        self._running: dict[int, Search] = {}
        self._complete: list[Search] = []
        self._last = FIRST_BEAM

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, choices: Many[Sequence]) -> Sequence:
        """The prompt of a new search, to be run as the first beam."""
        first = choices[0]
        asked = first.sampling
        beams = BeamSearch(asked.beam_width, asked.max_tokens, asked.length_penalty, unpack(asked.stop_ids))
        search = Search(choices, beams, [])
        self._running[first.id] = search
        # The search ends the text: the device goes on, with any token.
        device = msgspec.structs.replace(asked, stop_ids=b"", max_tokens=asked.max_tokens + 1)
        beam = replace(first, id=self._id(), tokens=list(first.tokens), sampling=device, search=search)
        beam.halt = len(beam.tokens)
        search.members.append(beam)
        return beam

    def advance(self, search: Search) -> list[tuple[Sequence, Sequence]]:
        """One round of a complete search: its next beams, each with its parent. None if it has ended with a result."""
        parents = search.members
        continuations = search.beams.advance([search.reports[i] for i in range(len(parents))])
        search.members = [
            replace(
                parents[parent],
                id=self._id(),
                tokens=[*parents[parent].tokens[: parents[parent].halt], token],
                halt=parents[parent].halt + 1,
                beam=number,
                reported=False,
                state=State.WAITING,
                slot=-1,
                blocks=[],
                computed=0,
                cached=0,
            )
            for number, (parent, token) in enumerate(continuations)
        ]
        search.reports = {}
        if not continuations:
            for choice, found in zip(search.choices, search.beams.finished, strict=False):
                choice.tokens += found.tokens
                choice.finish, choice.state = found.finish, State.FINISHED
            del self._running[search.choices[0].id]
            self.found.append(search)
        return [(child, parents[parent]) for child, (parent, _) in zip(search.members, continuations, strict=True)]

    def stall(self, beam: Sequence) -> None:
        """It waits for a slot."""
        insort(self.stalled, beam, key=rank)

    def unstall(self, sequence: Sequence) -> bool:
        """It waits no more; False if it did not wait here."""
        if sequence.search is None or sequence not in self.stalled:
            return False
        self.stalled.remove(sequence)
        return True

    def hear(self, output: StepOutput, sequences: dict[int, Sequence]) -> None:
        """Takes in the candidates of a step; `sequences` by id."""
        tokens, logprobs = unpack(output.candidates), np.frombuffer(output.logprobs, "<f4")
        told = iter(unpack(output.candidate_counts))
        begin = 0
        for i, count in zip(told, told, strict=True):
            end = begin + count
            beam = sequences.get(i)
            if beam is not None and beam.search is not None and not beam.reported:
                beam.reported = True
                beam.search.reports[beam.beam] = Candidates(tokens[begin:end], logprobs[begin:end])
                if beam.search.complete:
                    self._complete.append(beam.search)
            begin = end

    def complete(self) -> Iterator[Search]:
        """Those whose beams have all reported, each once."""
        complete, self._complete = self._complete, []
        return (search for search in complete if search.choices[0].id in self._running)

    def pop(self, choice: int) -> Search | None:
        """Ends the search with that first choice, if there is one."""
        return self._running.pop(choice, None)

    def _id(self) -> int:
        self._last += 1
        return self._last
