"""The variants of `kernels/triton/step/step_inputs.py` that devices launch."""

from pagewire.kernels.triton.step.step_inputs import BLOCK, step_inputs_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.tensors import STATE_TENSORS


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    columns = ("ids", "positions", "num_computed_tokens", "lengths", "slots", "cu_queries", "cu_places")
    sampled = ("place_slots", "ends", "place_tokens", "place_drafts")
    state = {name: kind for name, kind in STATE_TENSORS.items() if name != "last"}
    return [
        Configuration(
            name="any rows",
            kernel=step_inputs_kernel,
            tensors={**dict.fromkeys((*columns, *sampled), "i32"), "places": "i64", **state},
            constants={"BLOCK_SIZE": 16, "BLOCK": BLOCK},
        )
    ]
