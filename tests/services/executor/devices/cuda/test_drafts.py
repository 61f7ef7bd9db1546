"""Drafted tokens on the GPU device change neither a token nor a log-probability."""

from collections.abc import Callable
from functools import cache
from random import Random

import msgspec
import numpy as np
import pytest
import torch

from pagewire.services.executor.devices.protocol import Device, StepBatch
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import DraftRow, NewSequence
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages import pack
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling
from pagewire.shared.models.model_folder import eos_ids
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import batch_of, cpu_device, cuda_device
from tests.services.executor.devices.cuda.two_slots import TwoSlots
from tests.services.executor.fakes import DRAFTING, sampling
from tests.support.checkpoints import VOCABULARY, checkpoint
from tests.support.drafters import Scripted, drafting, guessing, knowing, wrong

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
FOLDER = checkpoint("llama")
STEP_DRAFTS = 8
PROMPTS = [[7, 300, 41, 5, 88], [12, 9], [300, 41, 7], [88, 5], [5, 7, 300, 41], [9, 9]]
FIELDS: list[tuple[dict[str, float], dict[str, object]]] = [
    ({}, {"logprobs": 2}),
    ({"temperature": 1.3, "top_p": 0.9, "top_k": 40}, {"logprobs": 0}),
    (
        {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"logprobs": 1, "bad_words": pack([1, 11, 2, 9, 9])},
    ),
    ({"temperature": 1.0}, {"grammar": "start: /(x|y)+/", "logprobs": 1}),
    ({"frequency_penalty": 2.0}, {"bias_ids": pack([9]), "biases": np.array([6.0], "<f4").tobytes()}),
    ({"temperature": 1.0}, {"grammar": 'start: ("the train " | "a ") ("left" | "late")'}),
]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: load_tokenizer(FOLDER).backend, VOCABULARY, eos_ids(FOLDER))


def picks(number: int) -> Sampling:
    columns, fields = FIELDS[number]
    fields = {"min_tokens": 3, "stop_ids": pack([*eos_ids(FOLDER), *range(100, 160)])} | fields
    chosen = sampling(number, max_tokens=9)
    return msgspec.structs.replace(chosen, record=record(**columns).tobytes(), **fields)


def run(device: Device, count: int, speculator: Speculator | None = None) -> TwoSlots:
    client, opener = TwoSlots(PROMPTS[:count], picks), GrammarOpener(compiler())
    client.run(device, opener, speculator)
    opener.close()
    return client


@cache
def expected(count: int) -> TwoSlots:
    """The first sequences without drafts, on the CPU."""
    return run(cpu_device("llama"), count)


def check(drafter: Callable[[list[list[int]]], Scripted], device: Device, count: int = len(PROMPTS)) -> Speculator:
    """Expects of the first sequences what they are without drafts; closes the device."""
    plain = expected(count)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain.texts, strict=False)]
    with drafting(None):
        speculator = Speculator(drafter(texts), 4, DRAFTING)
        drafted = run(device, count, speculator)
    assert (drafted.texts, drafted.finishes) == (plain.texts, plain.finishes)
    assert drafted.logprobs.keys() == plain.logprobs.keys()
    for place, (ids, values) in plain.logprobs.items():
        assert drafted.logprobs[place][0] == ids, place
        np.testing.assert_allclose(drafted.logprobs[place][1], values, atol=1e-4)
    assert speculator.drafted > 0
    return speculator


def opened(*, captured: bool = False) -> Device:
    return cuda_device("llama", captured=captured, step_drafts=STEP_DRAFTS)


def test_drafts_change_no_token_and_no_log_probability() -> None:
    """With drafts that are right and wrong by chance, in rows with and without penalties, bad words and a grammar."""
    speculator = check(guessing, opened(), count=4)
    assert 0 < speculator.accepted < speculator.drafted


@pytest.mark.full
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafter", [knowing, wrong, guessing])
def test_tokens_do_not_depend_on_the_drafts(drafter: Callable[[list[list[int]]], Scripted], captured: bool) -> None:
    speculator = check(drafter, opened(captured=captured))
    assert {Finish.STOP, Finish.LENGTH} <= set(expected(len(PROMPTS)).finishes)
    if drafter is knowing:
        assert speculator.accepted == speculator.drafted
    if drafter is wrong:
        assert speculator.accepted < 0.2 * speculator.drafted


def test_a_draft_model_drafts_the_same_tokens_as_on_a_cpu() -> None:
    random = Random(3)
    texts, sequences = [[7, 300, 41], [12, 9]], [NewSequence(record(key=key), 1) for key in range(2)]
    devices = [cpu_device("llama"), cuda_device("llama", captured=False)]
    drafters = [DraftModel(device, VOCABULARY) for device in devices]
    for drafter in drafters:
        for slot, sequence in enumerate(sequences):
            drafter.begin(slot, sequence)
    for _ in range(8):
        slots = random.choice([[0], [1], [0, 1]])
        rows = [DraftRow(slot, np.array(texts[slot]), random.randint(1, 2)) for slot in slots]
        drafts, same = ([draft.tokens for draft in drafter.draft(rows)] for drafter in drafters)
        assert drafts == same
        for slot, tokens in zip(slots, drafts, strict=True):
            texts[slot] += [*tokens[: random.randint(0, 2)], random.randrange(VOCABULARY)]
    for device in devices:
        device.close()


def draft_batch(slot: int, start: int, ids: list[int], drafts: int) -> StepBatch:
    return msgspec.structs.replace(batch_of((slot, start, ids, True)), num_drafts=np.array([drafts]))


@pytest.mark.full
def test_batch_invariant_steps_with_drafts_equal_single_steps_in_every_bit() -> None:
    """With `batch_invariant`, whose steps all have one shape."""
    prompt, sampled = [7, 300, 41], record(num_logprobs=3)
    reports: list[tuple[list[int], list[float]]] = []
    for drafts in (0, 2):
        device = cuda_device("llama", captured=False, batch_invariant=True, step_drafts=STEP_DRAFTS)
        device.add(0, [9], sampled)
        pending = device.launch(draft_batch(0, 0, prompt, 0))
        text, values = pending.wait().tolist(), []
        assert pending.logprobs is not None
        values += pending.logprobs.values.tolist()
        known = reports[0][0][1 : 1 + drafts] if drafts else []
        while len(text) < 5:
            pending = device.launch(draft_batch(0, len(prompt) + len(text) - 1, [text[-1], *known], len(known)))
            text += pending.wait().tolist()
            known = []
            assert pending.logprobs is not None
            values += pending.logprobs.values.tolist()
        reports.append((text[:5], values[:20]))
    assert reports[0] == reports[1]
