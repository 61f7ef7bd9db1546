"""`python -m tests.kernels.mutations`: breaks the kernels on purpose, one place at a time, and shows that a test fails.

Each mutant is a copy of the kernels and their tests with one piece of text replaced; the repository is not touched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEADLINE = 600
"""Seconds for one mutant. The tests that it runs have none of their own: a slow machine must not look like a catch."""


class Mutation(NamedTuple):
    """One deliberate mistake."""

    name: str
    file: str
    before: str
    after: str
    test: str
    """What must fail, as pytest names it below tests/kernels."""


MAIN = (
    Mutation(
        "causal mask by one",
        "attend.py",
        "seen = distance >= 0",
        "seen = distance >= 1",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "split reduction misses one",
        "join_splits.py",
        "there = (split < splits)",
        "there = (split < splits - 1)",
        "test_join_splits.py::test_more_splits_than_one_tile",
    ),
)

MORE = (
    Mutation(
        "a block that a window has left behind",
        "page_indices.py",
        "tl.maximum(entries, least // BLOCK_SIZE)",
        "entries",
        "test_page_indices.py::test_what_a_window_has_left_behind_is_not_listed",
    ),
    Mutation(
        "block offset by one",
        "attend.py",
        "* BLOCK_SIZE + keys % BLOCK_SIZE",
        "* BLOCK_SIZE + (keys + 1) % BLOCK_SIZE",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "one tile too many without a mask",
        "attend.py",
        "tl.minimum(first + 1, end)",
        "tl.minimum(first + TILE, end)",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "block table by one",
        "attend.py",
        "keys // BLOCK_SIZE, mask",
        "(keys + 1) // BLOCK_SIZE, mask",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "32-bit block offset",
        "attend.py",
        "other=0).to(tl.int64)",
        "other=0)",
        "test_paged_attention.py::test_offsets_beyond_32_bits",
    ),
    Mutation(
        "causal mask lets the next position in",
        "attend.py",
        "seen = distance >= 0",
        "seen = distance >= -1",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "window by one",
        "attend.py",
        "(distance < WINDOW)",
        "(distance <= WINDOW)",
        "test_paged_attention.py::test_window_and_soft_cap",
    ),
    Mutation(
        "shrink of the running sum forgotten",
        "attend.py",
        "total = total * shrink +",
        "total = total +",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "window begins a tile late",
        "paged_attention.py",
        "WINDOW + 1, 0) // TILE * TILE",
        "WINDOW + 1, 0) // TILE * TILE + TILE",
        "test_paged_attention.py::test_window_and_soft_cap",
    ),
    Mutation(
        "row found one early",
        "search.py",
        "middle * SLACK <= index",
        "middle * SLACK < index",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "split begins one tile late",
        "split_attention.py",
        "begin += (item - first_item) * width",
        "begin += (item - first_item) * width + TILE",
        "test_split_attention.py::test_few_and_many_splits",
    ),
    Mutation(
        "weights of splits in another base",
        "join_splits.py",
        "weights = tl.exp2(sums - base[None, :])",
        "weights = tl.exp(sums - base[None, :])",
        "test_join_splits.py",
    ),
    Mutation(
        "plan forgets the last tile",
        "plan_splits.py",
        "(length - begin + tile - 1) // tile",
        "(length - begin) // tile",
        "test_plan_splits.py::test_kernel_equals_reference",
    ),
    Mutation(
        "key written one place late",
        "rotary_cache.py",
        "+ place % BLOCK_SIZE) * HEAD_SIZE",
        "+ (place + 1) % BLOCK_SIZE) * HEAD_SIZE",
        "test_rotary_cache.py::test_a_ragged_batch_with_a_dead_row_in_the_dummy_block",
    ),
    Mutation(
        "filter keeps one too many",
        "sampler.py",
        "if tl.sum(weight, 0) >= goal:",
        "if tl.sum(weight, 0) > goal:",
        "test_sampler.py::test_top_k_keeps_no_token_more",
    ),
    Mutation(
        "tiles that a filter may skip, one too many",
        "sampler.py",
        "tl.where(index < count, tl.sort",
        "tl.where(index < count - 1, tl.sort",
        "test_sampler.py::test_filters",
    ),
    Mutation(
        "sum of a tile from another distance",
        "sampler.py",
        "(sums * tl.exp(top - peak))",
        "(sums * tl.exp(2 * (top - peak)))",
        "test_sampler.py::test_filters",
    ),
    Mutation(
        "longest tiles first, one left out",
        "paged_attention.py",
        "tl.num_programs(0) - 1 - tl.program_id(0)",
        "tl.num_programs(0) - 2 - tl.program_id(0)",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "scale forgotten in the exponent",
        "attend.py",
        "exponent = scale * LOG2E",
        "exponent = LOG2E",
        "test_paged_attention.py::test_mixed_batch_of_prompts_decodes_and_verify_tokens",
    ),
    Mutation(
        "inverse of the distribution by one",
        "sampler.py",
        "tl.where((reached_here > target)",
        "1 + tl.where((reached_here > target)",
        "test_sampler.py::test_filters",
    ),
    Mutation(
        "penalty of prompts for their presence",
        "edit_logits.py",
        "tl.where(count > 1, once, 0.0)",
        "tl.where(count > 0, once, 0.0)",
        "test_edit_logits.py::test_penalties_of_prompt_and_output",
    ),
    Mutation(
        "bad word begins one early",
        "edit_logits.py",
        "end - others + lane",
        "end - others - 1 + lane",
        "test_edit_logits.py::test_bad_words_ban_their_last_id_behind_the_others",
    ),
    Mutation(
        "token appended one late",
        "bookkeeping.py",
        "slot * context + end, token",
        "slot * context + end + 1, token",
        "test_steps.py::test_decode_steps_follow_each_other_without_the_host",
    ),
    Mutation(
        "length ends one late",
        "bookkeeping.py",
        "(end + 1 >= tl.load(last",
        "(end >= tl.load(last",
        "test_steps.py::test_length_ends_a_sequence_and_a_stop_id_goes_before_it",
    ),
    Mutation(
        "dead rows write where they wrote",
        "step_inputs.py",
        "block = tl.where(runs, block, dummy)",
        "block = tl.where(owned, block, dummy)",
        "test_steps.py::test_a_stop_id_makes_a_dead_row_that_writes_to_the_dummy_block",
    ),
    Mutation(
        "halves of a byte change places",
        "integer_linear.py",
        "(words.to(tl.int32) >> (BITS * PART))",
        "(words.to(tl.int32) >> (12 - BITS * PART))",
        "test_integer_linear.py::test_products",
    ),
    Mutation(
        "minima without the sum of the inputs",
        "integer_linear.py",
        "total += minimum[:, None] * tl.sum(inputs, 0)[None, :]",
        "total += minimum[:, None]",
        "test_integer_linear.py::test_products",
    ),
    Mutation(
        "scale of the next output",
        "integer_linear.py",
        "scales + group * OUTPUTS + output,",
        "scales + group * OUTPUTS + output + 1,",
        "test_integer_linear.py::test_products",
    ),
    Mutation(
        "scale of another group of activations",
        "eight_bit_linear.py",
        "row * (INPUTS // GROUP) + group, mask",
        "row * (INPUTS // GROUP), mask",
        "test_eight_bit_linear.py::test_products",
    ),
    Mutation(
        "activations cut instead of rounded",
        "round_rows.py",
        "tl.floor(values + 0.5)",
        "tl.floor(values)",
        "test_eight_bit_linear.py::test_rounding",
    ),
    Mutation(
        "residual added but not kept",
        "rms_norm.py",
        "tl.store(residual + place",
        "tl.store(out + place",
        "test_norms.py::test_norms",
    ),
    Mutation(
        "a tile runs into the tokens of the next expert",
        "route.py",
        "tl.minimum(begin + ROWS, end)",
        "tl.minimum(begin + ROWS, count)",
        "test_route.py::test_each_place_is_in_one_tile_of_its_expert",
    ),
    Mutation(
        "an expert chosen twice",
        "route.py",
        "x = tl.where(expert == index, -1.0, x)",
        "x = tl.where(expert == index + 1, -1.0, x)",
        "test_route.py::test_of_equal_experts_the_first_is_taken_and_none_twice",
    ),
    Mutation(
        "places of pairs counted from each block on",
        "route.py",
        "first += tl.sum(own, 0)",
        "first += 0 * tl.sum(own, 0)",
        "test_route.py::test_more_pairs_than_are_read_at_a_time",
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
        print(f"{'SURVIVED' if alive else 'caught':<10}{mutation.file:<22}{mutation.name}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
