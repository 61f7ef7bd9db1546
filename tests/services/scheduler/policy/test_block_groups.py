"""Which blocks of a table are held. Three groups: one without a window, two with windows of 8 and 4; blocks of 4."""

from pagewire.services.scheduler.policy.block_groups import BlockGroups

GROUPS = BlockGroups((0, 8, 4), 4)
TABLE = [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]


def test_a_window_leaves_behind_the_entries_that_no_position_sees() -> None:
    assert GROUPS.first_seen(0) == GROUPS.first_seen(7) == [0, 0]
    assert GROUPS.first_seen(8) == [0, 1]
    assert GROUPS.first_seen(12) == [1, 2]


def test_groups_without_a_window_hold_all_entries() -> None:
    assert GROUPS.all_of(TABLE) == [10, 20, 30, 40]
    assert BlockGroups((0,), 4).all_of(TABLE) == TABLE
    assert BlockGroups((4,), 4).all_of(TABLE) == []


def test_groups_with_a_window_hold_the_entries_that_are_seen() -> None:
    assert GROUPS.seen_of(TABLE, [0, 0]) == [11, 21, 31, 41, 12, 22, 32, 42]
    assert GROUPS.seen_of(TABLE, [1, 3]) == [21, 31, 41, 42]
    assert GROUPS.seen_of(TABLE, [0, 1], [1, 3]) == [11, 22, 32]
    assert BlockGroups((0,), 4).seen_of(TABLE, []) == []
