"""The join of split contexts in PyTorch, which the kernel is compared with."""

import torch


def reference(
    partial: torch.Tensor, logsum: torch.Tensor, cu_splits: torch.Tensor, cu_queries: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Returns `out` after `join_splits` of all rows, in float64. Rows with less than two splits are not joined."""
    result = out.double()
    for row in range(len(cu_queries) - 1):
        begin, end = cu_splits[row : row + 2].tolist()
        first, last = cu_queries[row : row + 2].tolist()
        if end - begin > 1 and last > first:
            weights = torch.exp2(logsum[begin:end, : last - first].double())
            weighted = (partial[begin:end, : last - first].double() * weights[..., None]).sum(0)
            result[first:last] = weighted / weights.sum(0).clamp(min=1e-300)[..., None]
    return result
