"""Logits are edited as float64 arithmetic does it, and edits follow the tokens that a slot generates."""

from collections import Counter
from ctypes import addressof
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels, LogitEdits, SamplerInput, address
from pagewire.services.executor.devices.cpu.compiled_backend import _pointers
from pagewire.services.executor.devices.edits import SlotEdits, bits_of, seen_of, slot_edits, words_of
from pagewire.services.executor.devices.protocol import Capacity, Edits
from pagewire.shared.sampling_parameters import Record, record

VOCABULARY = 70
CAPACITY = Capacity(1, 1, 4, 40, VOCABULARY)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(build.load(), threads=1)


ids = st.integers(0, VOCABULARY - 1)
edits = st.builds(
    lambda biases, allowed, words, tokens, prompt, penalized: Edits(
        bias_ids=np.array([*biases], np.int64),
        biases=np.array([*biases.values()], np.float32),
        allowed_ids=np.array(allowed, np.int64),
        bad_words=np.array([number for word in words for number in (len(word), *word)], np.int64),
        penalized=penalized,
        num_prompt_tokens=min(prompt, len(tokens)),
        tokens=np.array(tokens, np.int64),
    ),
    st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=4),
    st.just([]) | st.lists(ids, min_size=1, max_size=20, unique=True),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 9),
    st.booleans(),
)
prices = st.fixed_dictionaries(
    {
        "repetition_penalty": st.floats(0.2, 4.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
    }
)


def edited(logits: npt.NDArray[np.float64], how: Edits, price: Record, stops: list[int]) -> npt.NDArray[np.float64]:
    """The logits of the token after `how.tokens`, written down as the order of operations says it."""
    x, tokens = logits.copy(), how.tokens.tolist()
    output = tokens[how.num_prompt_tokens :]
    if len(how.allowed_ids):
        x[[token for token in range(VOCABULARY) if token not in how.allowed_ids]] = -np.inf
    for token, bias in zip(how.bias_ids, how.biases, strict=True):
        x[token] += bias
    x[stops] = -np.inf
    if how.penalized:
        factor = price["repetition_penalty"]
        for token in set(tokens):
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        for token, count in Counter(output).items():
            x[token] -= count * price["frequency_penalty"] + price["presence_penalty"]
    for *others, last in map(list, words_of(how.bad_words)):
        if len(others) <= len(output) and output[len(output) - len(others) :] == others:
            x[last] = -np.inf
    return x


@settings(max_examples=60, deadline=None)
@given(edits=edits, price=prices, early=st.booleans(), seed=st.integers(0, 99))
def test_kernels_edit_logits_in_the_documented_order(
    kernels: CpuKernels, edits: Edits, price: dict[str, float], early: bool, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCABULARY)
    position, stops = len(edits.tokens), [5, 60] if early else []
    row = record(min_length=position + 1 if early else 0, **price)
    expected = edited(logits, edits, row, stops)
    state = slot_edits(edits, CAPACITY)

    result = torch.tensor(np.stack([logits, logits]), dtype=torch.float32)
    records = np.stack([record(), row])
    ids, table = np.array([[-1, -1], [5, 60]]), (LogitEdits * 2)()
    table[1] = _pointers(state)
    sampling = SamplerInput(address(records), address(ids), 2, addressof(table))
    kernels.edit_logits(result, sampling, np.array([1, 0]), np.array([position, position]))
    np.testing.assert_allclose(result[0].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[1], torch.tensor(logits, dtype=torch.float32)), "a slot without edits"


@settings(max_examples=50, deadline=None)
@given(edits=edits, generated=st.lists(st.integers(0, 3), max_size=6))
def test_a_sequence_that_went_on_is_one_that_was_added_with_its_tokens(edits: Edits, generated: list[int]) -> None:
    """A sequence is added again after a preemption, a fork or the loss of an executor."""
    state = slot_edits(edits, CAPACITY)
    for position, token in enumerate(generated, len(edits.tokens)):
        state.append(position, token)
    whole = slot_edits(replace(edits, tokens=np.append(edits.tokens, generated).astype(np.int64)), CAPACITY)
    end = len(edits.tokens) + len(generated)
    assert (state.history is None) == (whole.history is None)
    if state.history is not None and whole.history is not None:
        assert state.history[:end].tolist() == whole.history[:end].tolist()
    assert (state.seen is None) == (whole.seen is None)
    if state.seen is not None and whole.seen is not None:
        assert state.seen.tolist() == whole.seen.tolist()


def test_counts_tell_prompt_and_output_apart() -> None:
    edits = blank(tokens=np.array([4, 4, 9, 4, 7, 7]), num_prompt_tokens=3)
    tokens, counts = seen_of(edits)
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {4: 3, 7: 4, 9: 1}


def test_bits_are_where_grammars_have_them() -> None:
    assert bits_of(np.array([0, 31, 33]), 40).tolist() == [1 << 31 | 1, 2]


@pytest.mark.parametrize("broken", [[2, 5], [0], [1, 5, 3, 1]])
def test_words_that_are_cut_off_are_refused(broken: list[int]) -> None:
    with pytest.raises(ValueError, match="cut off"):
        words_of(np.array(broken))


def blank(**values: Any) -> Edits:
    nothing = np.empty(0, np.int64)
    empty = Edits(nothing, nothing.astype(np.float32), nothing, nothing, penalized=True, num_prompt_tokens=0)
    return replace(empty, **values)


def test_a_slot_without_bad_words_keeps_no_history() -> None:
    state: SlotEdits = slot_edits(blank(tokens=np.array([1])), CAPACITY)
    assert state.history is None
