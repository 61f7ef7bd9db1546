"""Changes single logits before sampling: adds biases and bans stop ids below the minimum length."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit
from pagewire.kernels.sampling_table import SAMPLING_TENSORS, SamplingTable


@jit
def edit_logits_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    stop_ids: tl.tensor,
    min_length: tl.tensor,
    VOCABULARY: tl.constexpr,
    BIASES: tl.constexpr,
    STOPS: tl.constexpr,
    PADDED_BIASES: tl.constexpr,
    PADDED_STOPS: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    if end < 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    start = logits + row * VOCABULARY
    lane = tl.arange(0, PADDED_BIASES)
    token = tl.load(bias_ids + slot * BIASES + lane, mask=lane < BIASES, other=-1)
    value = tl.load(start + token, mask=token >= 0, other=0.0).to(tl.float32)
    value += tl.load(bias + slot * BIASES + lane, mask=token >= 0, other=0.0)
    tl.store(start + token, value.to(logits.dtype.element_ty), mask=token >= 0)
    tl.debug_barrier()  # a stop id may have a bias
    if end < tl.load(min_length + slot):
        place = tl.arange(0, PADDED_STOPS)
        stop = tl.load(stop_ids + slot * STOPS + place, mask=place < STOPS, other=-1)
        tl.store(start + stop, float("-inf"), mask=stop >= 0)


def edit_logits(table: SamplingTable, logits: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor) -> None:
    """Adds the biases to `logits` [R, vocabulary] in place, and bans stop ids below the slot's minimum length.

    `slots` is int32 [R]; `ends` int32 [R] is the position of the token to sample, or -1 for a row that samples none.
    """
    biases, stops = table.bias_ids.shape[1], table.stop_ids.shape[1]
    edit_logits_kernel[(len(logits),)](
        logits,
        slots,
        ends,
        table.bias_ids,
        table.bias,
        table.stop_ids,
        table.columns["min_length"],
        VOCABULARY=logits.shape[1],
        BIASES=biases,
        STOPS=stops,
        PADDED_BIASES=triton.next_power_of_2(biases),
        PADDED_STOPS=triton.next_power_of_2(stops),
    )


def reference(table: SamplingTable, logits: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns the logits after `edit_logits`."""
    result = logits.clone()
    for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
        if end < 0:
            continue
        biased = table.bias_ids[slot] >= 0
        result[row, table.bias_ids[slot][biased].long()] += table.bias[slot][biased].to(logits.dtype)
        if end < table.columns["min_length"][slot]:
            result[row, table.stop_ids[slot][table.stop_ids[slot] >= 0].long()] = float("-inf")
    return result


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.compile`."""
    tensors = {name: SAMPLING_TENSORS[name] for name in ("bias_ids", "bias", "stop_ids", "min_length")}
    sizes = {"BIASES": 300, "STOPS": 16, "PADDED_BIASES": 512, "PADDED_STOPS": 16}
    return [
        Configuration(
            name=f"{vocabulary} {dtype}",
            kernel=edit_logits_kernel,
            tensors={**tensors, "logits": dtype, "slots": "i32", "ends": "i32"},
            constants={"VOCABULARY": vocabulary, **sizes},
            spills=False,
        )
        for vocabulary, dtype in ((128256, "fp32"), (151936, "bf16"))
    ]
