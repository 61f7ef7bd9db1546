"""The number of blocks that a sequence takes, by hand. Blocks hold 16 positions, and the steps ahead fill 48."""

import pytest

from pagewire.shared.block_tables import blocks_of, entries_of_window


def test_a_window_holds_its_positions_and_the_next_steps_positions() -> None:
    assert entries_of_window(512, 48, 16) == (512 + 48) // 16 + 3


@pytest.mark.parametrize(
    ("windows", "held", "blocks"),
    [
        ((0,), (), 250),
        ((0, 512), (), 250 + 38),
        ((0, 512, 512), (30, 38), 250 + 8),
        ((0, 8192), (), 2 * 250),  # a window that is longer than the sequence holds all of it
    ],
)
def test_blocks_count_each_group_of_layers(windows: tuple[int, ...], held: tuple[int, ...], blocks: int) -> None:
    assert blocks_of(250, windows, 48, 16, held) == blocks
