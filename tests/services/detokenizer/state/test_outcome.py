"""The figures of a request's drafts, with vLLM's names."""

import msgspec
import pytest

from pagewire.services.detokenizer.state.outcome import DraftCounts


def test_a_request_without_drafts_has_no_figures() -> None:
    assert DraftCounts().metrics() is msgspec.UNSET


def test_draft_figures_are_defined_as_in_vllm() -> None:
    counts = DraftCounts()
    for drafted, accepted in ((4, 2), (4, 0), (2, 2)):
        counts.add(drafted, accepted)
    figures = counts.metrics()
    assert figures
    assert (figures.num_spec_steps, figures.num_draft_tokens, figures.num_accepted_draft_tokens) == (3, 10, 4)
    assert figures.acceptance_histogram == [1, 0, 2]
    assert figures.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert figures.draft_acceptance_rate == pytest.approx(0.4)
