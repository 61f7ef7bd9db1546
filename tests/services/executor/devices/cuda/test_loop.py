"""The step loop, two steps ahead, makes the GPU device emit what the CPU device does."""

import msgspec
import pytest
import torch

from pagewire.services.executor.devices.cuda.tables import NUM_CHECKED_STOP_IDS
from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.inbox import PlanInbox
from pagewire.services.executor.loop import StepLoop
from pagewire.services.executor.results import PlanRefused, StepResult
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.sampling import record
from tests.services.executor.devices.cuda.twins import BLOCK_SIZE, cpu_device, cuda_device
from tests.services.executor.fakes import add, plan, sampling
from tests.support.checkpoints import VOCABULARY

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPTS = [[7, 300, 41, 5, 88], [12, 9], [7, 300, 41]]
MOST = 4
Texts = list[list[int]]


class Client:
    """Two sequences run at a time. Where one ends, the next takes its slot and its block at once."""

    def __init__(self, stop_ids: Texts) -> None:
        self.inbox = PlanInbox()
        self.texts: Texts = [[] for _ in PROMPTS]
        self.finishes = [Finish.NONE] * len(PROMPTS)
        self._stop_ids = stop_ids
        self._waiting = list(range(len(PROMPTS)))
        self._slots: dict[int, int] = {}
        self._plans = 0

    def run(self, device: Device) -> None:
        self.inbox.begin(1)
        for slot in range(2):
            self._admit(slot)
        StepLoop(device, self.inbox, self._read).run()
        device.close()

    def _read(self, result: StepResult | PlanRefused) -> None:
        assert isinstance(result, StepResult), result
        output = result.output
        for number, token, finish in zip(unpack(output.sequences), unpack(output.tokens), output.finishes, strict=True):
            assert not self.finishes[number], "a row behind the end"
            if token != NO_TOKEN:
                self.texts[number].append(token)
            self.finishes[number] = Finish(finish)
            if finish and self._waiting:
                self._admit(self._slots[number], removed=[self._slots[number]])
        if all(self.finishes):
            self.inbox.close()

    def _admit(self, slot: int, removed: list[int] | None = None) -> None:
        number = self._waiting.pop(0)
        self._slots[number] = slot
        self._plans += 1
        picks = sampling(number, max_tokens=MOST, stop_ids=self._stop_ids[number])
        picks = msgspec.structs.replace(picks, record=record(temperature=number % 2).tobytes())
        added = add(slot, number, PROMPTS[number], [slot + 3], limit=BLOCK_SIZE, picks=picks)
        self.inbox.put(plan(self._plans, added, removed=removed or [], budget=6))


def test_tokens_and_ends_are_those_of_the_cpu() -> None:
    free = Client([[]] * len(PROMPTS))
    free.run(cpu_device("llama"))
    said = {token for text in free.texts for token in text}
    silent = [token for token in range(VOCABULARY) if token not in said][:NUM_CHECKED_STOP_IDS]
    # The first ends on the device. Of the third's stop ids, the device does not test the one that matters.
    stop_ids = [free.texts[0][1:2], [], [*silent, free.texts[2][1]]]
    expected, found = Client(stop_ids), Client(stop_ids)
    expected.run(cpu_device("llama"))
    device = cuda_device("llama", captured=False)
    assert device.depth == 2
    found.run(device)
    assert expected.finishes == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert (found.texts, found.finishes) == (expected.texts, expected.finishes)
