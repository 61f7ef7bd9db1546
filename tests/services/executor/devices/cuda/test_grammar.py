"""Two steps ahead, the GPU device follows grammars as the CPU device does."""

from functools import cache

import msgspec
import pytest
import torch

from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.grammars import GrammarOpener
from pagewire.services.executor.inbox import PlanInbox
from pagewire.services.executor.loop import StepLoop
from pagewire.services.executor.results import PlanRefused, StepResult
from pagewire.shared.grammars import GrammarCompiler
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.model_folder import eos_ids
from pagewire.shared.sampling import record
from pagewire.shared.tokenizer import load_tokenizer
from tests.services.executor.devices.cuda.twins import BLOCK_SIZE, cpu_device, cuda_device
from tests.services.executor.fakes import add, plan, sampling
from tests.support.checkpoints import VOCABULARY, checkpoint

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPTS = [[7, 300, 41, 5, 88], [12, 9], [7, 300, 41], [88, 5]]
GRAMMARS = ["start: /[ab]{2}c/", "", "start: /(x|y)+/", 'start: "one" | "two"']
FOLDER = checkpoint("llama")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: load_tokenizer(FOLDER).backend_tokenizer, VOCABULARY, eos_ids(FOLDER))


class Client:
    """Two sequences run at a time. Where one ends, the next takes its slot at once."""

    def __init__(self) -> None:
        self.inbox = PlanInbox()
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.finishes = [Finish.NONE] * len(PROMPTS)
        self._waiting = list(range(len(PROMPTS)))
        self._slots: dict[int, int] = {}
        self._plans = 0

    def run(self, device: Device) -> list[str]:
        self.inbox.begin(1)
        for slot in range(2):
            self._admit(slot)
        opener = GrammarOpener(compiler())
        StepLoop(device, self.inbox, self._read, opener).run()
        opener.close()
        device.close()
        library = load_tokenizer(FOLDER).backend_tokenizer
        return [library.decode(tokens) for tokens in self.tokens]

    def _read(self, result: StepResult | PlanRefused) -> None:
        assert isinstance(result, StepResult), result
        output = result.output
        for number, token, finish in zip(unpack(output.sequences), unpack(output.tokens), output.finishes, strict=True):
            assert not self.finishes[number], "a row behind the end"
            if token != NO_TOKEN:
                self.tokens[number].append(token)
            self.finishes[number] = Finish(finish)
            if finish and self._waiting:
                self._admit(self._slots[number], removed=[self._slots[number]])
        if all(self.finishes):
            self.inbox.close()

    def _admit(self, slot: int, removed: list[int] | None = None) -> None:
        number = self._waiting.pop(0)
        self._slots[number] = slot
        self._plans += 1
        picks = msgspec.structs.replace(
            sampling(number, max_tokens=8),
            record=record(temperature=1.0).tobytes(),
            stop_ids=pack(sorted(eos_ids(FOLDER))),
            min_tokens=3,
            grammar=GRAMMARS[number],
        )
        added = add(slot, number, PROMPTS[number], [slot + 3], limit=BLOCK_SIZE, picks=picks)
        self.inbox.put(plan(self._plans, added, removed=removed or [], budget=6))


def test_texts_are_those_of_the_cpu() -> None:
    expected = Client()
    texts = expected.run(cpu_device("llama"))
    found = Client()
    device = cuda_device("llama", captured=False)
    assert device.depth == 2
    assert found.run(device) == texts
    assert found.finishes == expected.finishes
    assert (found.finishes[0], len(texts[0]), texts[3] in {"one", "two"}) == (Finish.STOP, 3, True)
    assert set(texts[2]) <= set("xy")
    assert len(found.tokens[2]) >= 3
