"""The memory that models need: counted from their files, before anything is loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.memory_need import GPU_RUNTIME, SERVICES, memory_need, position_bytes, shares
from pagewire.shared.models.model_folder import BUNDLED, read_config, weight_files
from pagewire.shared.settings.config import Settings
from tests.support.gguf_files import random_model

WEIGHTS = sum(file.stat().st_size for file in weight_files(BUNDLED))
POSITION = position_bytes(read_config(BUNDLED), Settings())


def need(**settings: object) -> int:
    return memory_need(Settings(model="bundled", **{"device": "cpu", **settings}), BUNDLED)  # type: ignore[arg-type]


def more_of_three(path: Path) -> int:
    """Bytes that three ranks need more than one does, with caches of the same size."""
    one, three = (
        memory_need(Settings(device="cpu", kv_cache_memory=1, tensor_parallel_size=ranks), path) for ranks in (1, 3)
    )
    return three - one


def test_a_model_needs_its_weights_and_twice_the_cache_of_a_sequence() -> None:
    assert POSITION > 0
    assert need(max_model_len=100) == SERVICES + WEIGHTS + 200 * POSITION
    assert need(max_model_len=100, data_parallel_size=2) == SERVICES + 2 * (WEIGHTS + 200 * POSITION)


def test_a_cache_whose_size_is_set_counts_as_it_is() -> None:
    assert need(kv_cache_memory=12345) == SERVICES + WEIGHTS + 12345
    assert need(num_kv_blocks=10, block_size=16) == SERVICES + WEIGHTS + 160 * POSITION


def test_a_model_that_drafts_needs_as_much_again_if_it_is_as_large() -> None:
    twin = f'{{"model": "{BUNDLED}"}}'
    both = need(max_model_len=100, speculative_config=twin)
    assert both - SERVICES == 2 * (need(max_model_len=100) - SERVICES)
    assert need(kv_cache_memory=12345, speculative_config=twin) == SERVICES + 2 * WEIGHTS + 12345


def test_the_first_of_several_gpus_has_the_whole_model_that_drafts() -> None:
    gpu = {"device": "cuda", "max_model_len": 100, "tensor_parallel_size": 2}
    more = need(**gpu, speculative_config=f'{{"model": "{BUNDLED}"}}') - need(**gpu)
    assert more == WEIGHTS + 100 * POSITION


def test_ranks_that_share_kv_heads_each_have_a_cache_of_theirs() -> None:
    """The model has two. Of three ranks two have the same one, and each of two has one of its own."""
    one, two, three, four = (need(max_model_len=100, tensor_parallel_size=ranks) for ranks in (1, 2, 3, 4))
    assert one == two
    assert three - one == 200 * POSITION // 2
    assert four - one == 200 * POSITION
    assert need(num_kv_blocks=10, tensor_parallel_size=4) == SERVICES + WEIGHTS + 2 * 160 * POSITION
    assert need(kv_cache_memory=12345, tensor_parallel_size=4) == SERVICES + WEIGHTS + 12345
    gpu = {"device": "cuda", "max_model_len": 100}
    assert need(**gpu, tensor_parallel_size=4) == GPU_RUNTIME + (WEIGHTS + 200 * POSITION) // 4


@pytest.mark.parametrize(("architecture", "whole"), [("GraniteForCausalLM", True), ("LlamaForCausalLM", False)])
def test_each_rank_has_the_vocabulary_of_a_model_that_transformers_builds(
    architecture: str, whole: bool, tmp_path: Path
) -> None:
    shape = {"vocab_size": 30, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 8}
    config = shape | {"architectures": [architecture], "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = np.zeros((30, 8), np.float16)
    tensors = {"model.embed_tokens.weight": rows, "lm_head.weight": rows, "up": rows[:20], "bias": rows[:, 0].copy()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert more_of_three(tmp_path) == (2 * 2 * rows.nbytes if whole else 0)


def test_each_rank_has_the_vocabulary_of_a_gguf_file_that_transformers_builds(tmp_path: Path) -> None:
    path = random_model(tmp_path / "model.gguf", "granite", "Q8_0", width=256)
    tensors = GgufModel.open(path).tensors
    one = sum(tensors[name].rows * tensors[name].row_bytes for name in ("token_embd.weight", "output.weight"))
    assert more_of_three(path) == 2 * one


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GraniteForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match=r"cannot read .*model\.safetensors"):
        memory_need(Settings(device="cpu", kv_cache_memory=1, tensor_parallel_size=2), tmp_path)


def test_a_simulated_model_needs_only_its_services() -> None:
    assert need(device="sim:h100") == SERVICES


def test_memory_beyond_all_needs_is_divided_equally() -> None:
    assert shares({"a": 10, "b": 30}, free=100) == {"a": 40, "b": 60}
    assert shares({"a": 10, "b": 30}, free=100, fixed={"a"}) == {"a": 10, "b": 90}
    assert shares({"a": 10, "b": 30}, free=40) == {"a": 10, "b": 30}


def test_models_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"a at least 1\.50 GB, b .* 2\.00 GB, .* 3\.50 GB, .* 3\.00 GB"):
        shares({"a": 1_500_000_000, "b": 2_000_000_000}, free=3_000_000_000)
