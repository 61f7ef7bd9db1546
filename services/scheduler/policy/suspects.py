"""Finds the request that makes steps fail: suspects run alone, one by one. Pure."""

from collections.abc import Collection, Mapping


class Suspects:
    """The requests that were in a step that has raised, or in a slot when the executor was lost, by request id.

    Nobody is blamed for a failure in company. The first suspect is on trial: it runs alone until it has a new token,
    which clears it, or until it fails again, which proves it guilty.

    Losing an executor makes a suspect only of a request that had a slot when an executor was lost before and has no new
    token since: a process may be killed for another reason.

    >>> suspects = Suspects()
    >>> suspects.step_failed(["a", "b"])
    ''
    >>> suspects.on_trial, suspects.may_run("b")
    ('a', False)
    >>> suspects.step_failed(["a"])  # alone, too
    'a'
    """

    def __init__(self) -> None:
        self._suspects: list[str] = []
        self._lost_with: dict[str, int] = {}
        """Requests that had a slot when an executor was lost last, with the number of their tokens."""

    @property
    def on_trial(self) -> str:
        """The request that runs alone now; empty when all may run."""
        return self._suspects[0] if self._suspects else ""

    def may_run(self, request: str) -> bool:
        """Returns whether a request may run now."""
        return self.on_trial in {"", request}

    def step_failed(self, requests: Collection[str], *, strangers: bool = False) -> str:
        """Records that a step with these requests has raised; returns the guilty one, empty if that is not known.

        `strangers`: whether there were also sequences whose request is not held any more.
        """
        alone = [self.on_trial] if self._suspects else [] if strangers else list(requests)
        if len(alone) == 1:
            self.clear(alone[0])
            return alone[0]
        self._suspects += sorted(set(requests) - set(self._suspects))
        return ""

    def executor_lost(self, requests: Mapping[str, int]) -> str:
        """Records that the executor was lost while these requests had slots, with the numbers of their tokens.

        Returns the guilty request, empty if that is not known.
        """
        if list(requests) == [self.on_trial]:
            return self.step_failed(requests)
        stuck = {request for request, tokens in requests.items() if self._lost_with.get(request) == tokens}
        self._suspects += sorted(stuck - set(self._suspects))
        self._lost_with = dict(requests)
        return ""

    def clear(self, request: str) -> None:
        """Ends the suspicion against a request: it has a new token, or it has ended."""
        if request in self._suspects:
            self._suspects.remove(request)
        self._lost_with.pop(request, None)

    def retain(self, requests: Collection[str]) -> None:
        """Clears all other requests."""
        self._suspects = [request for request in self._suspects if request in requests]
        self._lost_with = {request: tokens for request, tokens in self._lost_with.items() if request in requests}
