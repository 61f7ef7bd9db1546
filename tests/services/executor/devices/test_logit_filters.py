"""Processed logits are those of the filtered softmax, whatever the filters and the neighbours."""

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagewire.services.executor.devices.logit_filters import CANDIDATES, processed_logits
from tests.support.exact_sampling import Sampling, filtered, records, samplings

Float = npt.NDArray[np.float32]


def processed(logits: Float, rows: list[Sampling]) -> Float:
    """Processed logits of one row per entry of `rows`, as a new array."""
    result: Float = processed_logits(torch.from_numpy(logits), records(rows)).numpy()
    return result


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(samplings, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 2, 17, 300, CANDIDATES, 3000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 9.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_kept_tokens_equal_a_full_sorts(
    rows: list[Sampling], vocabulary: int, spread: float, coarse: bool, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (len(rows), vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # so that many logits are equal, also at the thresholds
    for result, exact, row in zip(processed(logits, rows), logits.astype(np.float64), rows, strict=True):
        kept = np.isfinite(result)
        possible = np.stack([filtered(exact, row, slack) > 0 for slack in (-1e-5, 0.0, 1e-5)])
        assert (kept >= possible.all(axis=0)).all()
        assert (kept <= possible.any(axis=0)).all()
        np.testing.assert_allclose(result[kept], exact[kept] / row.temperature, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@example(
    rows=[
        *[Sampling(temperature=1.0)] * 2,
        Sampling(temperature=0.25, top_k=727),
        *[Sampling(temperature=1.0)] * 2,
        Sampling(temperature=1.0, top_p=0.5, top_k=1),
    ],
    seed=4,
)
@given(rows=st.lists(samplings, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[Sampling], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), 2000)).astype(np.float32)
    alone = [processed(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    np.testing.assert_array_equal(processed(logits, rows), np.stack(alone))


def test_greedy_rows_stay_as_they_are() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (50, 100)).astype(np.float32)
    rows = [Sampling(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, key=row) for row in range(50)]
    np.testing.assert_array_equal(processed(logits, rows), logits)


def test_equal_logits_at_a_threshold_are_all_kept() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0]], np.float32)
    for row in (Sampling(top_k=1), Sampling(top_k=2), Sampling(top_p=0.2), Sampling(min_p=1.0)):
        assert np.flatnonzero(np.isfinite(processed(logits, [row])[0])).tolist() == [1, 2, 3]
