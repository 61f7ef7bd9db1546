"""Sampling parameters by slot, for the tests of what reads them."""

import torch

from pagewire.kernels.sampling_table import COLUMNS, Penalties, SamplingTable
from pagewire.shared.sampling import record
from tests.kernels.batches import DEVICE, int32


def sampling_table(slots: int, **columns: object) -> SamplingTable:
    """Neutral sampling at temperature 1, but for the columns given."""

    def column(name: str, value: object, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.as_tensor(columns.get(name, value), dtype=dtype)
        return tensor.expand(slots).contiguous().to(DEVICE) if tensor.ndim == 0 else tensor.to(DEVICE)

    neutral = {name: record()[name] for name in COLUMNS} | {"temperature": 1.0, "key": list(range(1, slots + 1))}
    nothing = int32([[-1]] * slots)
    return SamplingTable(
        columns={name: column(name, neutral[name], dtype) for name, dtype in COLUMNS.items()},
        stop_ids=int32(columns["stop_ids"]) if "stop_ids" in columns else nothing,
        bias_ids=int32(columns["bias_ids"]) if "bias_ids" in columns else nothing,
        bias=torch.tensor(columns.get("bias", [[0.0]] * slots), device=DEVICE),
    )


def penalties(slots: int, vocabulary: int, seed: int = 0) -> Penalties:
    """Some tokens of prompts and outputs, and a price on each; slot 0 has no penalty."""
    random = torch.Generator().manual_seed(seed)
    seen = torch.randint(-20, 7, (slots, vocabulary), generator=random).clamp(min=0).int()

    def prices(low: float, high: float, off: float) -> torch.Tensor:
        values = torch.rand(slots, generator=random) * (high - low) + low
        values[0] = off
        return values.to(DEVICE)

    return Penalties(prices(1.1, 2.0, 1.0), prices(-1.0, 1.0, 0.0), prices(0.0, 0.5, 0.0), seen.to(DEVICE))
