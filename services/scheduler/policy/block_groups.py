"""The groups of layers: which blocks of its table a sequence holds where some layers see only a window of it.

The layers are divided into groups of equal size, and each entry of a block table has one block of every group, as in
vLLM's hybrid KV cache manager. A block is the same piece of memory in each group. The groups of layers with a window
give back the blocks that the window has left behind, while the table keeps their ids, which nobody reads any more.
"""


class BlockGroups:
    """The groups of a model's layers.

    Attributes:
        count: number of groups, and of blocks in an entry.
        windows: index of each group with a window, and how many positions a query sees in it, its own included.
        unbounded: index of each group without a window.
    """

    def __init__(self, windows: tuple[int, ...], block_size: int) -> None:
        """`windows` has an entry per group; 0: its layers see all positions."""
        self.count = len(windows)
        self.windows = [(group, window) for group, window in enumerate(windows) if window]
        self.unbounded = [group for group, window in enumerate(windows) if not window]
        self._size = block_size

    def first_seen(self, computed: int) -> list[int]:
        """Returns, per group with a window, the first entry that is read once `computed` positions are computed.

        One position more than the window is left, because the last computed position may be computed again.
        """
        return [max(0, computed - window) // self._size for _, window in self.windows]

    def all_of(self, blocks: list[int]) -> list[int]:
        """Returns the blocks of the groups without a window, in a table of which they hold all."""
        if not self.windows:
            return blocks
        return [block for group in self.unbounded for block in blocks[group :: self.count]]

    def seen_of(self, blocks: list[int], first: list[int], end: list[int] | None = None) -> list[int]:
        """Returns the blocks of the groups with a window in the entries [first, end) of each.

        Without `end`, the entries go to the end of the table.
        """
        count = self.count
        ends = end or [len(blocks)] * len(first)
        bounds = zip(self.windows, first, ends, strict=True)
        return [b for (g, _), i, j in bounds for b in blocks[i * count + g : j * count : count]]
