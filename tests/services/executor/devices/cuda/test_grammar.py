"""Two steps ahead, the GPU device follows grammars as the CPU device does."""

from functools import cache

import msgspec
import pytest
import torch

from pagewire.services.executor.devices.protocol import Device
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages import pack
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling
from pagewire.shared.models.model_folder import eos_ids
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import cpu_device, cuda_device
from tests.services.executor.devices.cuda.two_slots import TwoSlots
from tests.services.executor.fakes import sampling
from tests.support.checkpoints import VOCABULARY, checkpoint

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPTS = [[7, 300, 41, 5, 88], [12, 9], [7, 300, 41], [88, 5]]
GRAMMARS = ["start: /[ab]{2}c/", "", "start: /(x|y)+/", 'start: "the train " ("left" | "late")']
FOLDER = checkpoint("llama")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: load_tokenizer(FOLDER).backend, VOCABULARY, eos_ids(FOLDER))


def picks(number: int) -> Sampling:
    return msgspec.structs.replace(
        sampling(number, max_tokens=8),
        record=record(temperature=1.0).tobytes(),
        stop_ids=pack(sorted(eos_ids(FOLDER))),
        min_tokens=3,
        grammar=GRAMMARS[number],
    )


def run(device: Device, slots: int = 2) -> tuple[TwoSlots, list[str]]:
    client, opener = TwoSlots(PROMPTS, picks, slots), GrammarOpener(compiler())
    client.run(device, opener)
    opener.close()
    library = load_tokenizer(FOLDER).backend
    return client, [library.decode(tokens) for tokens in client.texts]


def test_texts_equal_the_cpus() -> None:
    expected, texts = run(cpu_device("llama"))
    device = cuda_device("llama", captured=False)
    assert device.depth == 2
    result, same = run(device)
    assert same == texts
    assert result.finishes == expected.finishes
    assert (result.finishes[0], len(texts[0]), texts[3].startswith("the train l")) == (Finish.STOP, 3, True)
    assert expected.forced >= result.forced > 0
    assert set(texts[2]) <= set("xy")
    assert len(result.texts[2]) >= 3


def test_rows_with_forced_tokens_wait_for_each_other_beside_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row computes one position of its forced tokens in a step, and samples nothing there."""
    monkeypatch.setattr("tests.services.executor.devices.cuda.test_grammar.PROMPTS", [PROMPTS[1], *PROMPTS[2:], [5, 7]])
    forced = 'start: "the train left late"'
    monkeypatch.setattr("tests.services.executor.devices.cuda.test_grammar.GRAMMARS", ["", forced, forced, forced])
    expected, texts = run(cpu_device("llama"), slots=3)
    result, same = run(cuda_device("llama", captured=False), slots=3)
    assert same == texts
    assert result.finishes == expected.finishes
    assert all(text.startswith("the train") for text in texts[1:])
