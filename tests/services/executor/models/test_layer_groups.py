"""Which layers share a block table and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.layer_groups import MAX_GROUPS, group_layers


def layers(windows: list[int]) -> list[Attention]:
    return [Attention(4, 2, 16, 1.0, window) for window in windows]


@pytest.mark.parametrize("windows", [[0] * 5, [64] * 5])
def test_layers_of_one_kind_are_one_group(windows: list[int]) -> None:
    groups = group_layers(layers(windows))
    assert groups.windows == tuple(windows[:1])
    assert groups.groups == (0,) * 5
    assert groups.places == groups.shared == (0, 1, 2, 3, 4)


def test_five_windows_for_each_full_layer_are_six_groups() -> None:
    """Gemma 3."""
    groups = group_layers(layers(([512] * 5 + [0]) * 8))
    assert groups.windows == (0, 512, 512, 512, 512, 512)
    assert len(groups.shared) == 8
    assert [group for group, window in zip(groups.groups, [512] * 5 + [0], strict=False) if not window] == [0]


def test_chunks_are_windows() -> None:
    kinds = [Attention(4, 2, 16, 1.0, chunk=64), Attention(4, 2, 16, 1.0)]
    assert group_layers(kinds).windows == (0, 64)


def test_layers_of_other_shapes_share_nothing() -> None:
    kinds = [Attention(4, 2, 16, 1.0, window=64), Attention(4, 2, 32, 1.0)]
    groups = group_layers(kinds)
    assert groups.windows == (0,)
    assert groups.shared == (0, 1)


@given(st.lists(st.sampled_from([0, 32, 64]), min_size=1, max_size=40))
def test_no_two_layers_of_a_group_have_the_same_place(windows: list[int]) -> None:
    groups = group_layers(layers(windows))
    assert [groups.windows[group] for group in groups.groups] == windows
    assert len(set(zip(groups.groups, groups.places, strict=True))) == len(windows)
    assert len(groups.windows) <= MAX_GROUPS
    assert sorted(groups.windows, key=bool) == list(groups.windows)
