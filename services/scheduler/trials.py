"""Finds the request that steps or executors fail of: `Suspects` decides which request runs alone."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.suspects import Suspects
from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.term import Term


class Trials:
    """The suspects among the requests of this scheduler. A trial lasts for one term."""

    def __init__(self, requests: Mapping[str, Request], by_sequence: Mapping[int, Request]) -> None:
        self._requests = requests
        self._by_sequence = by_sequence
        self._suspects = Suspects()

    @property
    def on_trial(self) -> str:
        """Id of the request that runs alone in this term; empty: all may run."""
        return self._suspects.on_trial

    def may_run(self, request: Request) -> bool:
        """Returns whether a request may run in this term."""
        return self._suspects.may_run(request.work.request_id)

    def retain_held(self) -> None:
        """Clears all requests that the scheduler does not hold any more."""
        self._suspects.retain(self._requests)

    def end(self, term: Term) -> bool:
        """Returns whether there was a trial and it has ended well. The next term continues with the other requests."""
        name = self.on_trial
        if not name:
            return False
        request = self._requests.get(name)
        if request is not None:
            if not term.trial_lengths:
                return False  # it is still being attached
            unfinished = [s for s in request.sequences if s.id in request.unfinished]
            if any(len(s.tokens) == term.trial_lengths[s.id] for s in unfinished):
                return False
        self._suspects.clear(name)
        return True

    def step_failed(self, sequences: Iterable[int], term: Term) -> str:
        """Records that a step with these sequences has raised; returns the guilty request, empty: not known yet."""
        by_id = term.policy.sequences.by_id
        owners = [self._owner(by_id[i]) if i in by_id else "" for i in sequences]
        return self._suspects.step_failed({*owners} - {""}, strangers="" in owners)

    def executor_lost(self, term: Term) -> str:
        """Records that the executor was lost with all that it ran; returns the guilty request, empty: not known yet."""
        lengths: Counter[str] = Counter()
        for sequence in term.policy.running:
            if owner := self._owner(sequence):
                lengths[owner] += len(sequence.tokens)
        return self._suspects.executor_lost(lengths)

    def _owner(self, sequence: Sequence) -> str:
        """Returns the id of the request that a sequence of the policy belongs to; empty if it has ended."""
        request = self._by_sequence.get(sequence.caller_ids[0])
        return request.work.request_id if request is not None else ""
