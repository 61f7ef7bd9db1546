"""A client of the step loop whose sequences run a few at a time."""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.messages.work import Sampling
from tests.services.executor.devices.cuda.twins import BLOCK_SIZE
from tests.services.executor.fakes import add, plan


class TwoSlots:
    """Two sequences run at a time, or `slots`. Where one ends, the next takes its slot and its block at once."""

    def __init__(self, prompts: Sequence[list[int]], picks: Callable[[int], Sampling], slots: int = 2) -> None:
        """`picks` returns how the sequence of a number is sampled."""
        self._num_slots = slots
        self.inbox = PlanInbox()
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.finishes = [Finish.NONE] * len(prompts)
        self.forced = 0
        """Tokens behind the first one of a row: forced, or drafted."""
        self.logprobs: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        """Ids and log-probabilities by sequence and position."""
        self._prompts = prompts
        self._picks = picks
        self._waiting = list(range(len(prompts)))
        self._slots: dict[int, int] = {}
        self._plans = 0

    def run(self, device: Device, grammars: GrammarOpener | None = None, speculator: Speculator | None = None) -> None:
        """Runs all sequences to their ends and closes the device."""
        self.inbox.begin(1)
        for slot in range(self._num_slots):
            self._admit(slot)
        StepLoop(device, self.inbox, self._read, grammars, speculator).run()
        device.close()

    def _read(self, result: StepResult | PlanRefused) -> None:
        assert isinstance(result, StepResult), result
        output = result.output
        first, more = output.split_tokens()
        ids, values = iter(unpack(output.logprob_ids)), iter(np.frombuffer(output.logprob_values, "<f4").tolist())
        columns = iter(unpack(output.logprob_tokens))
        for number, position, count in zip(columns, columns, columns, strict=True):
            self.logprobs[number, position] = [*islice(ids, count)], [*islice(values, count)]
        self.forced += sum(map(len, more.values()))
        for number, token, finish in zip(unpack(output.sequences), first, output.finishes, strict=True):
            assert not self.finishes[number], "a row behind the end"
            if token != NO_TOKEN:
                self.texts[number] += [token, *more.get(number, ())]
            self.finishes[number] = Finish(finish)
            if finish and self._waiting:
                self._admit(self._slots[number], removed=[self._slots[number]])
        if all(self.finishes):
            self.inbox.close()

    def _admit(self, slot: int, removed: list[int] | None = None) -> None:
        number = self._waiting.pop(0)
        self._slots[number] = slot
        self._plans += 1
        picks = self._picks(number)
        added = add(slot, number, self._prompts[number], [slot + 3], limit=BLOCK_SIZE, picks=picks)
        self.inbox.put(plan(self._plans, added, removed=removed or [], budget=6))
