"""The memory that models need: counted from their files, before anything is loaded."""

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.memory_need import SERVICES, memory_need, position_bytes, shares
from pagewire.shared.models.model_folder import BUNDLED, read_config, weight_files
from pagewire.shared.settings.config import Settings

WEIGHTS = sum(file.stat().st_size for file in weight_files(BUNDLED))
POSITION = position_bytes(read_config(BUNDLED), Settings())


def need(**settings: object) -> int:
    return memory_need(Settings(model="bundled", **{"device": "cpu", **settings}), BUNDLED)  # type: ignore[arg-type]


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


def test_a_simulated_model_needs_only_its_services() -> None:
    assert need(device="sim:h100") == SERVICES


def test_memory_beyond_all_needs_is_divided_equally() -> None:
    assert shares({"a": 10, "b": 30}, free=100) == {"a": 40, "b": 60}
    assert shares({"a": 10, "b": 30}, free=100, fixed={"a"}) == {"a": 10, "b": 90}
    assert shares({"a": 10, "b": 30}, free=40) == {"a": 10, "b": 30}


def test_models_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"a at least 1\.50 GB, b .* 2\.00 GB, .* 3\.50 GB, .* 3\.00 GB"):
        shares({"a": 1_500_000_000, "b": 2_000_000_000}, free=3_000_000_000)
