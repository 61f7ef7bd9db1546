"""Lengths, prompts and arrivals."""

import math
from itertools import islice, pairwise
from statistics import fmean, stdev

import pytest

from pagewire.bench._common.loads import LOADS, fastgen, poisson


@pytest.mark.parametrize("name", LOADS)
def test_a_seed_gives_the_same_requests_again(name: str) -> None:
    one, same, other = (poisson(LOADS[name], 4.0, 20, seed) for seed in (1, 1, 2))
    assert [(r.at, r.prompt, r.output) for r in one] == [(r.at, r.prompt, r.output) for r in same]
    assert [r.prompt for r in one] != [r.prompt for r in other]


def test_arrivals_are_poisson() -> None:
    requests = poisson(LOADS["prefill-heavy"], 8.0, 1000, 0)
    gaps = [b.at - a.at for a, b in pairwise(requests)]
    assert requests[0].at == 0.0
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert stdev(gaps) == pytest.approx(1 / 8, rel=0.1)


def test_at_an_infinite_rate_all_come_at_once() -> None:
    assert {r.at for r in poisson(LOADS["ShareGPT"], math.inf, 50, 0)} == {0.0}


def test_sharegpt_has_the_lengths_of_its_conversations() -> None:
    requests = poisson(LOADS["ShareGPT"], math.inf, 2000, 0)
    assert fmean(len(r.prompt) for r in requests) == pytest.approx(235.5, rel=0.1)
    assert fmean(r.output for r in requests) == pytest.approx(243.1, rel=0.1)
    assert all(len(r.prompt) >= 4 and r.output >= 4 for r in requests)


@pytest.mark.parametrize(("name", "output"), [("prefill-heavy", 16), ("decode-heavy", 256)])
def test_sonnets_share_their_beginning(name: str, output: int) -> None:
    requests = poisson(LOADS[name], math.inf, 10, 0)
    assert {(len(r.prompt), r.output) for r in requests} == {(462, output)}
    assert len({tuple(r.prompt[:62]) for r in requests}) == 1
    assert len({tuple(r.prompt[:80]) for r in requests}) == 10


def test_fastgen_lengths_are_normal_and_clamped() -> None:
    requests = list(islice(fastgen(2600, 60, 42), 2000))
    prompts = [len(r.prompt) for r in requests]
    assert fmean(prompts) == pytest.approx(2600, rel=0.03)
    assert stdev(prompts) == pytest.approx(780, rel=0.08)
    assert max(prompts) == 4000
    assert min(r.output for r in requests) >= 1
    assert stdev([r.output for r in requests]) == pytest.approx(18, rel=0.08)
