"""Tiles of the matrix products with quantized weights."""


def tiles(rows: int, itemsize: int, *, grouped: bool = False) -> tuple[int, int, int, int]:
    """Returns rows and outputs of a tile, warps and pipeline stages, for `rows` rows of elements of `itemsize` bytes.

    Few rows wait for the weights: narrow tiles spread them over more programs. With 1, 64 and 512 rows these were among
    the fastest on an H200; all others are unmeasured.

    `grouped`: integers with scales by group, whose outputs are the first operand.
    """
    if itemsize == 4:  # IEEE products on the ordinary cores: small tiles, or the accumulators spill
        return 16, 32, 4, 2
    if rows <= 16:
        return (16, 64, 4, 4) if grouped else (16, 32, 4, 6)
    if rows <= 32:
        return 32, 64, 4, 4
    if rows <= 64:
        return 64, 64, 4, 3
    return 128, 128, 8, 3
