"""Sampling parameters by slot, for the tests of what reads them."""

import torch

from pagewire.kernels.triton.sampling.sampling_columns import COLUMNS, SamplingColumns
from pagewire.shared.sampling_parameters import record
from tests.kernels.triton.batches import DEVICE, int32


def sampling_columns(slots: int, **columns: object) -> SamplingColumns:
    """Neutral sampling at temperature 1, but for the columns given."""

    def column(name: str, value: object, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.as_tensor(columns.get(name, value), dtype=dtype)
        return tensor.expand(slots).contiguous().to(DEVICE) if tensor.ndim == 0 else tensor.to(DEVICE)

    neutral = {name: record()[name] for name in COLUMNS} | {"temperature": 1.0, "key": list(range(1, slots + 1))}
    nothing = int32([[-1]] * slots)
    tables = ("allowed", "seen", "bad_words", "bad_word_ends")
    return SamplingColumns(
        columns={name: column(name, neutral[name], dtype) for name, dtype in COLUMNS.items()},
        stop_ids=int32(columns["stop_ids"]) if "stop_ids" in columns else nothing,
        bias_ids=int32(columns["bias_ids"]) if "bias_ids" in columns else nothing,
        bias=torch.tensor(columns.get("bias", [[0.0]] * slots), device=DEVICE),
        **{name: int32(columns[name]) if name in columns else nothing for name in tables},
        edits=int32(columns.get("edits", [0] * slots)),
        num_prompt_tokens=int32(columns.get("num_prompt_tokens", [0] * slots)),
    )
