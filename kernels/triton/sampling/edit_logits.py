"""Edits the logits of single rows: allowed tokens, biases, the minimum length, penalties, bad words, in this order."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import Configuration, jit
from pagewire.kernels.triton.sampling import sampling_columns
from pagewire.kernels.triton.sampling.sampling_columns import SAMPLING_TENSORS, SamplingColumns

TILE = 2048
ALLOWED: tl.constexpr = tl.constexpr(sampling_columns.ALLOWED)
BIASED: tl.constexpr = tl.constexpr(sampling_columns.BIASED)
PENALIZED: tl.constexpr = tl.constexpr(sampling_columns.PENALIZED)
BAD_WORDS: tl.constexpr = tl.constexpr(sampling_columns.BAD_WORDS)


@jit
def edit_logits_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    edits: tl.tensor,
    allowed: tl.tensor,
    bias_ids: tl.tensor,
    bias: tl.tensor,
    stop_ids: tl.tensor,
    min_length: tl.tensor,
    repetition_penalty: tl.tensor,
    frequency_penalty: tl.tensor,
    presence_penalty: tl.tensor,
    seen: tl.tensor,
    bad_words: tl.tensor,
    bad_word_ends: tl.tensor,
    num_prompt_tokens: tl.tensor,
    state_tokens: tl.tensor,
    context: tl.int32,
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    STOPS: tl.constexpr,
    BAD_IDS: tl.constexpr,
    MOST_BAD: tl.constexpr,
    PADDED_BIASES: tl.constexpr,
    PADDED_STOPS: tl.constexpr,
    PADDED_BAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program: one row. Most rows have no edits and end after two loads."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    if end < 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    kinds = tl.load(edits + slot)
    start = logits + row * VOCABULARY
    if (kinds & ALLOWED) != 0:
        for tile in range(0, VOCABULARY, TILE):
            token = tile + tl.arange(0, TILE)
            mask = token < VOCABULARY
            bits = tl.load(allowed + slot * WORDS + token // 32, mask=mask, other=0)
            tl.store(start + token, float("-inf"), mask=mask & (((bits >> (token % 32)) & 1) == 0))
        tl.debug_barrier()  # an id may be edited more than once
    if (kinds & BIASED) != 0:
        lane = tl.arange(0, PADDED_BIASES)
        token = tl.load(bias_ids + slot * BIASES + lane, mask=lane < BIASES, other=-1)
        value = tl.load(start + token, mask=token >= 0, other=0.0).to(tl.float32)
        value += tl.load(bias + slot * BIASES + lane, mask=token >= 0, other=0.0)
        tl.store(start + token, value.to(logits.dtype.element_ty), mask=token >= 0)
        tl.debug_barrier()
    if end < tl.load(min_length + slot):
        place = tl.arange(0, PADDED_STOPS)
        stop = tl.load(stop_ids + slot * STOPS + place, mask=place < STOPS, other=-1)
        tl.store(start + stop, float("-inf"), mask=stop >= 0)
        tl.debug_barrier()
    if (kinds & PENALIZED) != 0:
        factor = tl.load(repetition_penalty + slot)
        each = tl.load(frequency_penalty + slot)
        once = tl.load(presence_penalty + slot)
        for tile in range(0, VOCABULARY, TILE):
            token = tile + tl.arange(0, TILE)
            count = tl.load(seen + slot * VOCABULARY + token, mask=token < VOCABULARY, other=0)
            x = tl.load(start + token, mask=count > 0, other=0.0).to(tl.float32)
            x = tl.where(x > 0, x / factor, x * factor)
            x -= each * (count // 2).to(tl.float32) + tl.where(count > 1, once, 0.0)
            tl.store(start + token, x.to(logits.dtype.element_ty), mask=count > 0)
        tl.debug_barrier()
    if (kinds & BAD_WORDS) != 0:
        output = end - tl.load(num_prompt_tokens + slot)
        lane = tl.arange(0, PADDED_BAD)
        first = end * 0
        for word in range(MOST_BAD):
            last = tl.load(bad_word_ends + slot * MOST_BAD + word)
            others = last - first - 1
            if (others >= 0) & (others <= output):
                wanted = tl.load(bad_words + slot * BAD_IDS + first + lane, mask=lane < others, other=0)
                found = tl.load(state_tokens + slot * context + end - others + lane, mask=lane < others, other=0)
                if tl.sum((wanted != found).to(tl.int32), 0) == 0:
                    tl.store(start + tl.load(bad_words + slot * BAD_IDS + last - 1), float("-inf"))
            first = tl.maximum(first, last)


def edit_logits(
    table: SamplingColumns, logits: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, state_tokens: torch.Tensor
) -> None:
    """Edits `logits` [R, vocabulary] in place.

    `slots` is int32 [R]; `ends` int32 [R] is the position of the token to sample, or -1 for a row that samples none;
    `state_tokens` int32 [S, context] has the tokens before that position.
    """
    biases, stops, bad_ids = table.bias_ids.shape[1], table.stop_ids.shape[1], table.bad_words.shape[1]
    columns = table.columns
    edit_logits_kernel[(len(logits),)](
        logits,
        slots,
        ends,
        table.edits,
        table.allowed,
        table.bias_ids,
        table.bias,
        table.stop_ids,
        columns["min_length"],
        columns["repetition_penalty"],
        columns["frequency_penalty"],
        columns["presence_penalty"],
        table.seen,
        table.bad_words,
        table.bad_word_ends,
        table.num_prompt_tokens,
        state_tokens,
        state_tokens.shape[1],
        VOCABULARY=logits.shape[1],
        WORDS=table.allowed.shape[1],
        BIASES=biases,
        STOPS=stops,
        BAD_IDS=bad_ids,
        MOST_BAD=table.bad_word_ends.shape[1],
        PADDED_BIASES=triton.next_power_of_2(biases),
        PADDED_STOPS=triton.next_power_of_2(stops),
        PADDED_BAD=triton.next_power_of_2(bad_ids),
        TILE=TILE,
    )


def reference(
    table: SamplingColumns, logits: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, state_tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the logits after `edit_logits`."""
    result = logits.clone()
    for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
        if end < 0:
            continue
        x, kinds = result[row], int(table.edits[slot])
        if kinds & sampling_columns.ALLOWED:
            token = torch.arange(len(x), device=x.device)
            x[(table.allowed[slot][token // 32] >> (token % 32)) & 1 == 0] = float("-inf")
        if kinds & sampling_columns.BIASED:
            biased = table.bias_ids[slot] >= 0
            x[table.bias_ids[slot][biased].long()] += table.bias[slot][biased].to(x.dtype)
        if end < table.columns["min_length"][slot]:
            x[table.stop_ids[slot][table.stop_ids[slot] >= 0].long()] = float("-inf")
        if kinds & sampling_columns.PENALIZED:
            x.copy_(_penalized(table, x, slot))
        if kinds & sampling_columns.BAD_WORDS:
            output = state_tokens[slot, int(table.num_prompt_tokens[slot]) : end].tolist()
            ids, first = table.bad_words[slot].tolist(), 0
            for last in filter(None, table.bad_word_ends[slot].tolist()):
                *others, banned = ids[first:last]
                if len(others) <= len(output) and output[len(output) - len(others) :] == others:
                    x[banned] = float("-inf")
                first = last
    return result


def _penalized(table: SamplingColumns, x: torch.Tensor, slot: int) -> torch.Tensor:
    count, wide, columns = table.seen[slot], x.float(), table.columns
    factor = columns["repetition_penalty"][slot]
    wide = torch.where(count > 0, torch.where(wide > 0, wide / factor, wide * factor), wide)
    each, once = columns["frequency_penalty"][slot], columns["presence_penalty"][slot]
    return (wide - (each * (count // 2) + once * (count > 1))).to(x.dtype)


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.triton.compile`."""
    columns = ("min_length", "repetition_penalty", "frequency_penalty", "presence_penalty")
    tables = ("bias_ids", "bias", "stop_ids", "edits", "allowed", "seen", "bad_words", "bad_word_ends")
    tensors = {name: SAMPLING_TENSORS[name] for name in (*columns, *tables, "num_prompt_tokens")}
    tensors |= dict.fromkeys(("slots", "ends", "state_tokens"), "i32")
    lengths = {
        "BIASES": sampling_columns.MAX_BIASES,
        "STOPS": sampling_columns.MAX_STOP_IDS,
        "BAD_IDS": sampling_columns.MAX_BAD_WORD_IDS,
    }
    padded = {f"PADDED_{name.removesuffix('_IDS')}": triton.next_power_of_2(width) for name, width in lengths.items()}
    sizes = {**lengths, **padded, "MOST_BAD": sampling_columns.MAX_BAD_WORDS, "TILE": TILE}
    return [
        Configuration(
            name=f"{vocabulary} tokens",
            kernel=edit_logits_kernel,
            tensors={**tensors, "logits": "fp32"},
            constants={"VOCABULARY": vocabulary, "WORDS": -(-vocabulary // 32), **sizes},
            spills=False,
        )
        for vocabulary in sampling_columns.VOCABULARIES
    ]
