"""Edits the logits of single rows: allowed tokens, biases, the minimum length, penalties, bad words, in this order."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.jit import jit
from pagewire.kernels.triton.sampling import sampling_columns
from pagewire.kernels.triton.sampling.sampling_columns import SamplingColumns

TILE = 2048
GRAMMAR: tl.constexpr = tl.constexpr(sampling_columns.GRAMMAR)
ALLOWED: tl.constexpr = tl.constexpr(sampling_columns.ALLOWED)
BIASED: tl.constexpr = tl.constexpr(sampling_columns.BIASED)
PENALIZED: tl.constexpr = tl.constexpr(sampling_columns.PENALIZED)
BAD_WORDS: tl.constexpr = tl.constexpr(sampling_columns.BAD_WORDS)


@jit
def bar_others(start: tl.tensor, bits: tl.tensor, VOCABULARY: tl.constexpr, TILE: tl.constexpr) -> None:
    """Sets the logits at `start` of tokens without their bit to minus infinity."""
    for tile in range(0, VOCABULARY, TILE):
        token = tile + tl.arange(0, TILE)
        mask = token < VOCABULARY
        words = tl.load(bits + token // 32, mask=mask, other=0)
        tl.store(start + token, float("-inf"), mask=mask & (((words >> (token % 32)) & 1) == 0))
    tl.debug_barrier()  # an id may be edited more than once


@jit
def edit_logits_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    drafts: tl.tensor,
    masks: tl.tensor,
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
        bar_others(start, allowed + slot * WORDS, VOCABULARY, TILE)
    if (kinds & GRAMMAR) != 0:
        bar_others(start, masks + row * WORDS, VOCABULARY, TILE)
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
        drafted = tl.load(drafts + row)
        for tile in range(0, VOCABULARY, TILE):
            token = tile + tl.arange(0, TILE)
            count = tl.load(seen + slot * VOCABULARY + token, mask=token < VOCABULARY, other=0)
            for back in range(drafted):
                draft = tl.load(state_tokens + slot * context + end - 1 - back)
                count += tl.where(token == draft, 2, 0)
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
                beginning = tl.load(bad_words + slot * BAD_IDS + first + lane, mask=lane < others, other=0)
                latest = tl.load(state_tokens + slot * context + end - others + lane, mask=lane < others, other=0)
                if tl.sum((beginning != latest).to(tl.int32), 0) == 0:
                    tl.store(start + tl.load(bad_words + slot * BAD_IDS + last - 1), float("-inf"))
            first = tl.maximum(first, last)


def edit_logits(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    masks: torch.Tensor,
    state_tokens: torch.Tensor,
) -> None:
    """Edits `logits` [R, vocabulary] in place.

    `slots` is int32 [R]; `ends` int32 [R] is the position of the token to sample, or -1 for a row that samples none;
    `state_tokens` int32 [S, context] has the tokens before that position. The last `drafts` int32 [R] of these are
    drafted and not yet counted in `seen`. `masks` int32 [R, ceil(vocabulary / 32)] has the tokens that grammars allow.
    """
    biases, stops, bad_ids = table.bias_ids.shape[1], table.stop_ids.shape[1], table.bad_words.shape[1]
    columns = table.columns
    edit_logits_kernel[(len(logits),)](
        logits,
        slots,
        ends,
        drafts,
        masks,
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
