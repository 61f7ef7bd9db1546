"""Earlier outputs are kept by tenant, within bounds, and found by two tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.speculation import earlier_outputs
from pagewire.services.executor.speculation.earlier_outputs import END, EarlierOutputs


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12), st.integers(1, 8))
def test_a_pair_is_found_at_each_of_its_places_within_an_output(texts: list[list[int]], most: int) -> None:
    outputs = EarlierOutputs(most)
    for text in texts:
        outputs.add("", array(text))
    kept = outputs.of("")
    assert kept.tokens.tolist() == [token for text in texts[-most:] for token in (*text, END)]
    for pair in ([0, 0], [0, 1], [2, 1]):
        places = [place for place in range(1, len(kept.tokens)) if kept.tokens[place - 1 : place + 1].tolist() == pair]
        assert kept.places(array(pair)).tolist() == places[-earlier_outputs.MOST_PLACES :]


def test_the_outputs_of_a_tenant_and_the_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_outputs, "SALT_TOKENS", 8)
    monkeypatch.setattr(earlier_outputs, "MAX_SALTS", 2)
    outputs = EarlierOutputs(3)
    for number in range(20):
        outputs.add("a", array([*range(number, number + number % 5)]))
        assert len(outputs.of("a").tokens) <= 8
    outputs.add("a", array([*range(100)]))
    assert outputs.of("a").tokens.tolist() == [93, 94, 95, 96, 97, 98, 99, -1]
    for output in range(5):
        outputs.add("b", array([output]))
    assert outputs.of("b").tokens.tolist() == [2, -1, 3, -1, 4, -1]
    outputs.add("c", array([1]))
    assert not len(outputs.of("a").tokens)
    assert len(outputs.of("b").tokens)
