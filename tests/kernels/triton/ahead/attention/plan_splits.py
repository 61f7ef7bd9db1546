"""The variants of `kernels/triton/attention/plan_splits.py` that devices launch."""

from pagewire.kernels.triton.attention.plan_splits import FEWEST, plan_splits_kernel
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    return [
        Configuration(
            name=f"{rows} rows",
            kernel=plan_splits_kernel,
            tensors=dict.fromkeys(("item_rows", "cu_splits", "split_size", "lengths", "cu_queries"), "i32"),
            constants={"ROWS": rows},
            spills=False,
        )
        for rows in (FEWEST << octave for octave in range(5))
    ]
