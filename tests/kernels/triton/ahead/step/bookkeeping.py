"""The variants of `kernels/triton/step/bookkeeping.py` that devices launch."""

import triton

from pagewire.kernels.triton.sampling.sampling_columns import CHECKED_STOP_IDS
from pagewire.kernels.triton.step.bookkeeping import BLOCK, bookkeeping_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.tensors import STATE_TENSORS


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    columns = ("sampled", "slots", "num_computed_tokens", "ends", "cu_queries", "cu_places", "stop_ids", "seen")
    names = ("state_tokens", "known", "computed", "last", "alive")
    tensors = {**dict.fromkeys(columns, "i32"), "finishes": "u8", **{name: STATE_TENSORS[name] for name in names}}
    padded = triton.next_power_of_2(CHECKED_STOP_IDS)
    sizes = {"STOPS": CHECKED_STOP_IDS, "PADDED": padded, "BLOCK": BLOCK}
    return [Configuration("any rows", bookkeeping_kernel, tensors, sizes)]
