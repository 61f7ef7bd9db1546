"""`python -m tests.kernels.triton.mutations`: breaks the kernels on purpose, one place at a time.

Each mutant is a copy of the kernels and their tests with one piece of text replaced; the repository is not touched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
DEADLINE = 600
"""Seconds for one mutant. The tests that it runs have none of their own: a slow machine must not look like a catch."""


class Mutation(NamedTuple):
    """One deliberate mistake."""

    name: str
    file: str
    before: str
    after: str
    test: str
    """The test that must fail, as pytest names it below tests/kernels."""


MAIN = (
    Mutation(
        "causal mask by one",
        "triton/attention/attend.py",
        "seen = distance >= 0",
        "seen = distance >= 1",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "split reduction misses one",
        "triton/attention/join_splits.py",
        "there = (split < splits)",
        "there = (split < splits - 1)",
        "triton/attention/test_join_splits.py::test_more_splits_than_a_tile_has_are_joined",
    ),
)

MORE = (
    Mutation(
        "a block that a window has left behind",
        "triton/attention/page_indices.py",
        "tl.maximum(entries, least // BLOCK_SIZE)",
        "entries",
        "triton/attention/test_page_indices.py::test_blocks_behind_a_window_are_not_listed",
    ),
    Mutation(
        "block offset by one",
        "triton/attention/attend.py",
        "* BLOCK_SIZE + keys % BLOCK_SIZE",
        "* BLOCK_SIZE + (keys + 1) % BLOCK_SIZE",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "one tile too many without a mask",
        "triton/attention/attend.py",
        "tl.minimum(first + 1, end)",
        "tl.minimum(first + TILE, end)",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "block table by one",
        "triton/attention/attend.py",
        "keys // BLOCK_SIZE, mask",
        "(keys + 1) // BLOCK_SIZE, mask",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "32-bit block offset",
        "triton/attention/attend.py",
        "other=0).to(tl.int64)",
        "other=0)",
        "triton/attention/test_paged_attention.py::test_offsets_beyond_32_bits_do_not_overflow",
    ),
    Mutation(
        "causal mask lets the next position in",
        "triton/attention/attend.py",
        "seen = distance >= 0",
        "seen = distance >= -1",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "window by one",
        "triton/attention/attend.py",
        "(distance < WINDOW)",
        "(distance <= WINDOW)",
        "triton/attention/test_paged_attention.py::test_window_and_soft_cap_equal_the_reference",
    ),
    Mutation(
        "shrink of the running sum forgotten",
        "triton/attention/attend.py",
        "total = total * shrink +",
        "total = total +",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "window begins a tile late",
        "triton/attention/paged_attention.py",
        "WINDOW + 1, 0) // TILE * TILE",
        "WINDOW + 1, 0) // TILE * TILE + TILE",
        "triton/attention/test_paged_attention.py::test_window_and_soft_cap_equal_the_reference",
    ),
    Mutation(
        "row found one early",
        "triton/attention/find_row.py",
        "middle * SLACK <= index",
        "middle * SLACK < index",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "split begins one tile late",
        "triton/attention/decode_attention.py",
        "begin += (item - first_item) * width",
        "begin += (item - first_item) * width + TILE",
        "triton/attention/test_decode_attention.py::test_few_and_many_splits_equal_the_reference",
    ),
    Mutation(
        "weights of splits in another base",
        "triton/attention/join_splits.py",
        "weights = tl.exp2(sums - base[None, :])",
        "weights = tl.exp(sums - base[None, :])",
        "triton/attention/test_join_splits.py",
    ),
    Mutation(
        "plan forgets the last tile",
        "triton/attention/plan_splits.py",
        "(length - begin + tile - 1) // tile",
        "(length - begin) // tile",
        "triton/attention/test_plan_splits.py::test_the_kernel_equals_the_reference",
    ),
    Mutation(
        "key written one place late",
        "triton/attention/rotary_cache.py",
        "+ place % BLOCK_SIZE) * HEAD_SIZE",
        "+ (place + 1) % BLOCK_SIZE) * HEAD_SIZE",
        "triton/attention/test_rotary_cache.py::test_a_ragged_batch_with_a_dead_row_equals_the_reference",
    ),
    Mutation(
        "filter keeps one too many",
        "triton/sampling/sampler.py",
        "if tl.sum(weight, 0) >= goal:",
        "if tl.sum(weight, 0) > goal:",
        "triton/sampling/test_sampler.py::test_top_k_keeps_no_token_more",
    ),
    Mutation(
        "tiles that a filter may skip, one too many",
        "triton/sampling/sampler.py",
        "tl.where(index < count, tl.sort",
        "tl.where(index < count - 1, tl.sort",
        "triton/sampling/test_sampler.py::test_every_filter_equals_the_reference",
    ),
    Mutation(
        "sum of a tile from another distance",
        "triton/sampling/sampler.py",
        "(sums * tl.exp(top - peak))",
        "(sums * tl.exp(2 * (top - peak)))",
        "triton/sampling/test_sampler.py::test_every_filter_equals_the_reference",
    ),
    Mutation(
        "longest tiles first, one left out",
        "triton/attention/paged_attention.py",
        "tl.num_programs(0) - 1 - tl.program_id(0)",
        "tl.num_programs(0) - 2 - tl.program_id(0)",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "scale forgotten in the exponent",
        "triton/attention/attend.py",
        "exponent = scale * LOG2E",
        "exponent = LOG2E",
        "triton/attention/test_paged_attention.py::test_a_mixed_batch_equals_the_reference",
    ),
    Mutation(
        "inverse of the distribution by one",
        "triton/sampling/sampler.py",
        "tl.where((reached_here > target)",
        "1 + tl.where((reached_here > target)",
        "triton/sampling/test_sampler.py::test_every_filter_equals_the_reference",
    ),
    Mutation(
        "penalty of prompts for their presence",
        "triton/sampling/edit_logits.py",
        "tl.where(count > 1, once, 0.0)",
        "tl.where(count > 0, once, 0.0)",
        "triton/sampling/test_edit_logits.py::test_prompt_and_output_are_penalized_apart",
    ),
    Mutation(
        "bad word begins one early",
        "triton/sampling/edit_logits.py",
        "end - others + lane",
        "end - others - 1 + lane",
        "triton/sampling/test_edit_logits.py::test_bad_words_ban_their_last_id_behind_the_others",
    ),
    Mutation(
        "token appended one late",
        "triton/step/bookkeeping.py",
        "slot * context + end + place",
        "slot * context + end + place + 1",
        "triton/step/test_steps.py::test_decode_steps_follow_each_other_without_the_host",
    ),
    Mutation(
        "length ends one late",
        "triton/step/bookkeeping.py",
        "(end >= tl.load(last",
        "(end > tl.load(last",
        "triton/step/test_steps.py::test_length_ends_a_sequence_and_a_stop_id_goes_before_it",
    ),
    Mutation(
        "a token behind a wrong draft is kept",
        "triton/step/bookkeeping.py",
        "drafted & (new == draft)",
        "drafted",
        "triton/step/test_steps.py::test_a_row_keeps_its_drafts_up_to_the_first_that_is_wrong",
    ),
    Mutation(
        "wrong drafts count as computed",
        "triton/step/bookkeeping.py",
        "start + width - wrong",
        "start + width",
        "triton/step/test_steps.py::test_a_row_keeps_its_drafts_up_to_the_first_that_is_wrong",
    ),
    Mutation(
        "all places sample the last token",
        "triton/step/step_inputs.py",
        "tl.where(samples, end - behind, -1)",
        "tl.where(samples, end, -1)",
        "triton/step/test_steps.py::test_a_row_keeps_its_drafts_up_to_the_first_that_is_wrong",
    ),
    Mutation(
        "the last draft is not penalized",
        "triton/sampling/edit_logits.py",
        "end - 1 - back",
        "end - 2 - back",
        "triton/sampling/test_edit_logits.py::test_drafted_tokens_before_a_place_are_penalized",
    ),
    Mutation(
        "a grammar's mask is that of another place",
        "triton/sampling/edit_logits.py",
        "masks + row * WORDS",
        "masks + slot * WORDS",
        "triton/sampling/test_edit_logits.py::test_a_grammar_allows_other_tokens_at_each_place_of_a_slot",
    ),
    Mutation(
        "dead rows write where they wrote",
        "triton/step/step_inputs.py",
        "block = tl.where(runs, block, dummy)",
        "block = tl.where(owned, block, dummy)",
        "triton/step/test_steps.py::test_a_stop_id_makes_a_dead_row_that_writes_to_the_dummy_block",
    ),
    Mutation(
        "halves of a byte change places",
        "triton/layers/integer_linear.py",
        "(words.to(tl.int32) >> (BITS * PART))",
        "(words.to(tl.int32) >> (12 - BITS * PART))",
        "triton/layers/test_integer_linear.py::test_products_equal_the_reference",
    ),
    Mutation(
        "minima without the sum of the inputs",
        "triton/layers/integer_linear.py",
        "total += minimum[:, None] * tl.sum(inputs, 0)[None, :]",
        "total += minimum[:, None]",
        "triton/layers/test_integer_linear.py::test_products_equal_the_reference",
    ),
    Mutation(
        "scale of the next output",
        "triton/layers/integer_linear.py",
        "scales + following * OUTPUTS + output,",
        "scales + following * OUTPUTS + output + 1,",
        "triton/layers/test_integer_linear.py::test_products_equal_the_reference",
    ),
    Mutation(
        "scale of another group of activations",
        "triton/layers/eight_bit_linear.py",
        "row * (INPUTS // GROUP) + group, mask",
        "row * (INPUTS // GROUP), mask",
        "triton/layers/test_eight_bit_linear.py::test_products_equal_the_reference",
    ),
    Mutation(
        "an update begins in the ranks of the one before it",
        "triton/layers/low_rank.py",
        "        before += ranks",
        "        before += 0 * ranks",
        "triton/layers/test_low_rank.py::test_a_mix_of_ranks_and_plain_tokens_equals_the_reference",
    ),
    Mutation(
        "an update without its scale",
        "triton/layers/low_rank.py",
        "(narrow * scale)",
        "(narrow)",
        "triton/layers/test_low_rank.py::test_a_mix_of_ranks_and_plain_tokens_equals_the_reference",
    ),
    Mutation(
        "the first share of the inputs, twice",
        "triton/layers/low_rank.py",
        "tl.int64) * split * width",
        "tl.int64) * 0 * split * width",
        "triton/layers/test_low_rank.py::test_products_of_programs_that_share_inputs_equal_the_reference",
    ),
    Mutation(
        "activations cut instead of rounded",
        "triton/layers/round_rows.py",
        "tl.floor(values + 0.5)",
        "tl.floor(values)",
        "triton/layers/test_eight_bit_linear.py::test_rounded_rows_equal_the_reference",
    ),
    Mutation(
        "residual added but not kept",
        "triton/layers/rms_norm.py",
        "tl.store(residual + place",
        "tl.store(out + place",
        "triton/layers/test_norms.py::test_norms_equal_the_reference",
    ),
    Mutation(
        "a tile runs into the tokens of the next expert",
        "triton/layers/moe_routing.py",
        "tl.minimum(begin + ROWS, end)",
        "tl.minimum(begin + ROWS, count)",
        "triton/layers/test_moe_routing.py::test_each_place_is_in_one_tile_of_its_expert",
    ),
    Mutation(
        "an expert chosen twice",
        "triton/layers/moe_routing.py",
        "x = tl.where(expert == index, -1.0, x)",
        "x = tl.where(expert == index + 1, -1.0, x)",
        "triton/layers/test_moe_routing.py::test_equal_experts_are_taken_in_order_and_once_each",
    ),
    Mutation(
        "places of pairs counted from each block on",
        "triton/layers/moe_routing.py",
        "first += tl.sum(own, 0)",
        "first += 0 * tl.sum(own, 0)",
        "triton/layers/test_moe_routing.py::test_more_pairs_than_are_read_at_a_time_are_grouped",
    ),
    Mutation(
        "experts of a rank numbered as those of the first",
        "triton/layers/moe_routing.py",
        "== lowest + expert)",
        "== expert)",
        "triton/layers/test_moe_routing.py::test_each_rank_groups_the_pairs_of_its_experts",
    ),
)


def survives(mutation: Mutation) -> bool:
    """Whether its test passes in spite of the mistake.

    Raises:
        ValueError: the text to replace is not there exactly once.
        RuntimeError: the test did not run.
        subprocess.TimeoutExpired: it took longer than `DEADLINE`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pagewire", "kernels", "shared", "tests/kernels"):
            ignored = shutil.ignore_patterns("__pycache__", "bundled")
            shutil.copytree(ROOT / name, Path(folder) / name, symlinks=True, ignore=ignored)
        (Path(folder) / "tests" / "__init__.py").touch()
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = Path(folder) / "kernels" / mutation.file
        source = path.read_text()
        if source.count(mutation.before) != 1:
            raise ValueError(
                f"{mutation.name}: {mutation.before!r} is in {mutation.file} {source.count(mutation.before)} times"
            )
        path.write_text(source.replace(mutation.before, mutation.after))
        test, options = f"tests/kernels/{mutation.test}", ["-x", "-p", "no:randomly", "--timeout=0"]
        command = [sys.executable, "-m", "pytest", test, *options]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE
        )
        if result.returncode > 1:  # negative: the mutant read where no memory is, and is caught
            raise RuntimeError(f"{mutation.name}: {result.stdout}{result.stderr}")
        return result.returncode == 0


def main() -> int:
    """Applies every mutation; the exit code says whether one survived."""
    failed = False
    for mutation in MAIN + MORE:
        alive = survives(mutation)
        failed |= alive
        print(f"{'SURVIVED' if alive else 'caught':<10}{mutation.file:<40}{mutation.name}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
