"""On a driver that only counts: nothing compiles late, every form is proved by `make kernels`, no step waits."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import pytest
import torch

from pagewire.kernels.gpu_arch import PARTS
from tests.kernels.triton.ahead.gpus import SHARED_MEMORY
from tests.services.executor.devices.cuda.fake_gpu import LAYERS, Operations

CAPTURED = {
    "copy_", "embedding", "empty_like", "flatten", "index_select", "linear", "new_empty", "slice", "to", "unsqueeze",
    "zeros_like",
}  # fmt: skip
"""Operations of PyTorch in a graph: products, the embedding, and what has no kernel of its own."""
SHARED = {"add", "mul", "sigmoid"}
"""Launches that a mixture of experts with a shared one adds."""
VOCABULARY = {"__or__", "ge", "lt", "sub", "masked_fill", "masked_fill_"}
"""Operations that find the ids that a rank has."""
DEPENDENT = {
    "choose_kernel", "combine_kernel", "expand_kernel", "gated_kernel", "group_kernel", "grouped_linear_kernel",
    "paged_attention_kernel", "rms_norm_kernel", "rotary_cache_kernel", "shrink_kernel",
    "split_attention_kernel",
}  # fmt: skip
"""Kernels that begin before the previous one has ended, where the GPU allows it."""
AROUND = CAPTURED | {
    "_to_copy", "cat", "clamp_min", "detach", "gather", "ge", "index_copy_", "logsumexp", "new_zeros", "select", "sub",
    "sum", "topk", "view", "zero_",
}  # fmt: skip
"""Operations around the graphs: none of them makes the host wait, as `item`, `nonzero` or an index from the host do."""


def observed(*arguments: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.services.executor.devices.cuda.fake_gpu", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    observations: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return observations


def check(observations: dict[str, Any], *, arch: int = 90, more: Set[str] = frozenset()) -> None:
    """`more`: operations of PyTorch that not every model has."""
    assert observations["late"] == [], "a request would wait for a compilation"
    assert observations["unknown"] == [], "`make kernels` does not compile what is launched"
    launched = {name for launches in observations["launches"].values() for name in launches}
    assert set(observations["dependent"]) == (launched & DEPENDENT if arch >= 90 else set())
    assert set(observations["captured"]) <= CAPTURED | more
    assert set(observations["operations"]) <= AROUND | more


def check_launches(
    observations: dict[str, Any], layer: Mapping[str, int], model: Mapping[str, int] = MappingProxyType({})
) -> None:
    """`layer`: what a layer launches beside norms and attention; `model`: what is launched once for all of them."""
    by_layer = dict.fromkeys(("rotary_cache_kernel", "split_attention_kernel"), LAYERS)
    by_layer |= {"rms_norm_kernel": 2 * LAYERS + 1} | {name: LAYERS * count for name, count in layer.items()}
    once = ("step_inputs", "plan_splits", "edit_logits", "tile_sums", "sample", "bookkeeping")
    decode = dict(Counter(by_layer | {f"{name}_kernel": 1 for name in once}) + Counter(model))
    mixed = decode | {"paged_attention_kernel": LAYERS}
    assert len(observations["launches"]) == 10
    for bucket, launches in observations["launches"].items():
        assert launches == (decode if bucket.startswith("decode") else mixed), bucket


def test_a_step_launches_the_expected_kernels_and_compiles_nothing() -> None:
    observations = observed()
    check(observations)
    check_launches(observations, {"gated_kernel": 1})


def test_a_step_with_drafts_launches_the_graphs_of_a_mixed_step() -> None:
    observations = observed()
    check(observations)
    mixed = observations["launches"]["mixed 16"] | {"scatter_kernel": 1}
    assert observations["drafted"] == dict.fromkeys(("1 x 1", "1 x 7", "4 x 5", "12 x 1"), mixed)


def test_a_draft_model_runs_graphs_alone_whatever_it_knows_of_a_text() -> None:
    observations = observed("--draft-model", "qwen3-0.6b")
    check(observations)
    check_launches(observations, {"gated_kernel": 1})


def test_a_step_launches_the_same_with_any_number_of_adapters() -> None:
    observations = observed("--adapters", "8")
    check(observations)
    products = 4
    check_launches(observations, {"gated_kernel": 1, "shrink_kernel": products, "expand_kernel": products})
    none, one, eight = (observations["adapted"][count] for count in ("0", "1", "8"))
    assert none == one == eight
    assert none["shrink_kernel"] == none["expand_kernel"] == products * LAYERS


def test_flashinfer_is_planned_without_waiting() -> None:
    """By a stand-in, which refuses what FlashInfer would wait for. Only decode steps are captured."""
    observations = observed("--attention", "flashinfer")
    check(observations)
    by_layer = {"rms_norm_kernel": 2 * LAYERS + 1, "rotary_cache_kernel": LAYERS, "gated_kernel": LAYERS}
    once = ("step_inputs", "page_indices", "edit_logits", "tile_sums", "sample", "bookkeeping")
    decode = by_layer | {f"{name}_kernel": 1 for name in once}
    assert observations["launches"] == {f"decode {rows}": decode for rows in (1, 2, 4, 8, 12)}


def test_a_rank_of_four_sums_inside_its_graphs_and_compiles_nothing() -> None:
    observations = observed("--model", "llama-3-70b", "--ranks", "4")
    check(observations, more=VOCABULARY)
    check_launches(observations, {"gated_kernel": 1, "all_reduce": 2}, {"all_reduce": 1, "all_gather": 1})
    assert observations["decode_collectives"] == 0


def test_adapters_add_no_collective_to_a_rank_of_four() -> None:
    observations = observed("--model", "llama-3-70b", "--ranks", "4", "--adapters", "8")
    check(observations, more=VOCABULARY)
    products = 4
    layer = {"gated_kernel": 1, "all_reduce": 2, "shrink_kernel": products, "expand_kernel": products}
    check_launches(observations, layer, {"all_reduce": 1, "all_gather": 1})
    none, one, eight = (observations["adapted"][count] for count in ("0", "1", "8"))
    assert none == one == eight
    assert observations["decode_collectives"] == 0


@pytest.mark.parametrize(
    ("model", "arch"),
    [
        ("qwen1.5-moe-a2.7b", 90),
        *(
            pytest.param(model, arch, marks=pytest.mark.full)
            for model in ("qwen1.5-moe-a2.7b", "mixtral-8x7b", "qwen3-30b-a3b")
            for arch in (80, 90, 120)
            if (model, arch) != ("qwen1.5-moe-a2.7b", 90)
        ),
    ],
)
def test_experts_launch_the_expected_kernels_and_compile_nothing(model: str, arch: int) -> None:
    observations = observed("--model", model, "--arch", str(arch))
    shared = model == "qwen1.5-moe-a2.7b"
    check(observations, arch=arch, more=SHARED if shared else frozenset())
    routing = dict.fromkeys(("choose_kernel", "group_kernel", "combine_kernel"), 1)
    check_launches(observations, routing | {"grouped_linear_kernel": 2, "gated_kernel": 1 + shared})


def test_a_rank_with_whole_experts_launches_what_one_with_all_of_them_does() -> None:
    """And its collectives: the sum behind a dense layer adds up the routed outputs."""
    observations = observed("--model", "qwen3-30b-a3b", "--ranks", "2", "--whole-experts")
    check(observations, more=VOCABULARY)
    routing = dict.fromkeys(("choose_kernel", "group_kernel", "combine_kernel"), 1)
    layer = routing | {"grouped_linear_kernel": 2, "gated_kernel": 1, "all_reduce": 2}
    check_launches(observations, layer, {"all_reduce": 1, "all_gather": 1})
    assert observations["decode_collectives"] == 0


@pytest.mark.full
@pytest.mark.parametrize("arch", PARTS)
def test_the_kernels_compiled_for_a_gpu_fit_it(arch: int) -> None:
    observations = observed("--arch", str(arch), "--compile")
    check(observations, arch=arch)
    check_launches(observations, {"gated_kernel": 1})
    assert 0 < observations["shared"] <= SHARED_MEMORY[arch]


@pytest.mark.full
@pytest.mark.parametrize("arguments", [["--model", "qwen3-0.6b"], ["--model", "qwen3-14b"], ["--cache", "fp8"]])
def test_other_models_launch_known_forms(arguments: list[str]) -> None:
    check(observed(*arguments))


def test_a_copy_from_pageable_memory_is_noticed() -> None:
    target = torch.zeros(3, device="meta")
    with pytest.raises(AssertionError, match="pageable"), Operations(set()):
        target.copy_(torch.zeros(3))
