"""The edits of logits in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.sampling import sampling_columns
from pagewire.kernels.triton.sampling.sampling_columns import SamplingColumns


def reference(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    masks: torch.Tensor,
    state_tokens: torch.Tensor,
) -> torch.Tensor:
    """Returns the logits after `edit_logits`."""
    result = logits.clone()
    for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
        if end < 0:
            continue
        x, kinds = result[row], int(table.edits[slot])
        token = torch.arange(len(x), device=x.device)
        if kinds & sampling_columns.ALLOWED:
            x[(table.allowed[slot][token // 32] >> (token % 32)) & 1 == 0] = float("-inf")
        if kinds & sampling_columns.GRAMMAR:
            x[(masks[row][token // 32] >> (token % 32)) & 1 == 0] = float("-inf")
        if kinds & sampling_columns.BIASED:
            biased = table.bias_ids[slot] >= 0
            x[table.bias_ids[slot][biased].long()] += table.bias[slot][biased].to(x.dtype)
        if end < table.columns["min_length"][slot]:
            x[table.stop_ids[slot][table.stop_ids[slot] >= 0].long()] = float("-inf")
        if kinds & sampling_columns.PENALIZED:
            drafted = state_tokens[slot, end - int(drafts[row]) : end]
            x.copy_(_penalized(table, x, slot, drafted))
        if kinds & sampling_columns.BAD_WORDS:
            output = state_tokens[slot, int(table.num_prompt_tokens[slot]) : end].tolist()
            ids, first = table.bad_words[slot].tolist(), 0
            for last in filter(None, table.bad_word_ends[slot].tolist()):
                *others, banned = ids[first:last]
                if len(others) <= len(output) and output[len(output) - len(others) :] == others:
                    x[banned] = float("-inf")
                first = last
    return result


def _penalized(table: SamplingColumns, x: torch.Tensor, slot: int, drafted: torch.Tensor) -> torch.Tensor:
    count, wide, columns = table.seen[slot].clone(), x.float(), table.columns
    for token in drafted.tolist():
        count[token] += 2
    factor = columns["repetition_penalty"][slot]
    wide = torch.where(count > 0, torch.where(wide > 0, wide / factor, wide * factor), wide)
    each, once = columns["frequency_penalty"][slot], columns["presence_penalty"][slot]
    return (wide - (each * (count // 2) + once * (count > 1))).to(x.dtype)
