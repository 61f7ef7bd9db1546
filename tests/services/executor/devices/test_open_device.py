"""Opening a device: what is refused, and how large the pool becomes."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pagewire.kernels.cpu import build
from pagewire.services.executor.devices import capacity, open_device
from pagewire.services.executor.devices.capacity import pool_blocks, usable_memory
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import linux_process
from pagewire.shared.process.linux_process import free_memory
from pagewire.shared.settings.config import Settings, load
from tests.support.checkpoints import CONTEXT, VOCABULARY, checkpoint

GIB = 1 << 30


def pool(room: int = GIB // 2, max_model_len: int = 1000, **flags: Any) -> int:
    settings = load({name.replace("_", "-"): value for name, value in flags.items()}, {})
    return pool_blocks(settings, max_model_len, bytes_per_block=1 << 16, free_bytes=room, limit_bytes=GIB)


def refusal(folder: Path, **flags: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        open_device(load({name.replace("_", "-"): value for name, value in flags.items()}, {}), folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_capacity_follows_settings_and_model() -> None:
    device = open_device(load({"max-num-seqs": 3, "block-size": 32, "num-kv-blocks": 20}, {}), checkpoint("llama"))
    capacity = device.capacity
    assert (capacity.num_blocks, capacity.block_size, capacity.max_num_seqs) == (20, 32, 3)
    assert (capacity.max_model_len, capacity.vocab_size) == (CONTEXT, VOCABULARY)
    device.close()


def test_the_context_can_be_shortened_but_not_stretched() -> None:
    device = open_device(load({"max-model-len": 100}, {}), checkpoint("llama"))
    assert device.capacity.max_model_len == 100
    device.close()
    assert str(CONTEXT) in refusal(checkpoint("llama"), max_model_len=CONTEXT + 1)


@pytest.mark.parametrize("name", ["sim:b300", "sim:", "tpu"])
def test_other_devices_are_refused_by_name(name: str) -> None:
    assert name in refusal(checkpoint("llama"), device=name)


@pytest.mark.parametrize("name", ["lora_modules", "lora_dirs"])
def test_settings_of_adapters_are_not_ignored_where_adapters_are_off(name: str) -> None:
    assert "needs enable-lora: set it too" in refusal(checkpoint("llama"), **{name: "a=/adapters/a"})


def test_settings_that_ranks_do_not_support_are_refused_by_name() -> None:
    assert "tensor-parallel-size" in refusal(checkpoint("gpt-oss"), tensor_parallel_size=2)


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
def test_an_fp8_cache_is_refused_by_name_where_it_is_not_built(device: str) -> None:
    refused = refusal(checkpoint("llama"), device=device, kv_cache_dtype="fp8")
    assert "kv-cache-dtype fp8" in refused
    assert device in refused


def test_an_executor_takes_no_more_than_the_memory_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(capacity, "family_bytes", lambda _: GIB)
    assert usable_memory(Settings()) == 8 * GIB
    assert usable_memory(Settings(data_parallel_size=2)) == 4 * GIB
    assert usable_memory(Settings(model_memory=3 * GIB)) == 2 * GIB
    assert usable_memory(Settings(model_memory=6 * GIB, data_parallel_size=2)) == 2 * GIB
    assert usable_memory(Settings(model_memory=GIB // 2)) == 0


@pytest.mark.parametrize("device", ["cuda", "sim:h100"])
def test_an_int8_cache_is_refused_by_name_where_it_is_not_built(device: str) -> None:
    refused = refusal(checkpoint("llama"), device=device, kv_cache_dtype="int8")
    assert f"device {device} does not support kv-cache-dtype int8: set it to auto" in refused


def test_without_kernels_and_compiler_the_error_says_how_to_get_them() -> None:
    with patch.object(build, "load", side_effect=build.NotBuilt("there is no c++")):
        refused = refusal(checkpoint("llama"))
    assert refused == (
        "the CPU kernels are not compiled: there is no c++. Install a C++ compiler (Debian's package g++), "
        "or a wheel of Pagewire that holds them (make wheel)"
    )


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
def test_batch_invariance_is_refused_by_name_where_it_is_not_built(device: str) -> None:
    refused = refusal(checkpoint("llama"), device=device, batch_invariant="true")
    assert "batch-invariant" in refused
    assert device in refused


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
@pytest.mark.parametrize("backend", ["flashinfer", "FLASHINFER", "TRITON_ATTN"])
def test_a_backend_of_attention_is_for_cuda_only(device: str, backend: str) -> None:
    refused = refusal(checkpoint("llama"), device=device, attention_backend=backend)
    assert refused == f"device {device} does not support attention-backend {backend}: leave it out"


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in refusal(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


def test_a_pool_is_as_large_as_the_slots_can_use() -> None:
    assert pool(max_num_seqs=4, block_size=16) == 4 * 63


def test_a_pool_takes_at_most_the_memory_that_is_left() -> None:
    assert pool(max_num_seqs=1000) == GIB // 2 // (1 << 16)


def test_a_pool_has_the_size_that_is_set() -> None:
    assert pool(kv_cache_memory=100 << 16) == 100
    assert pool(num_kv_blocks=77, kv_cache_memory=1) == 77
    assert pool(room=0, num_kv_blocks=63) == 63


@pytest.mark.parametrize(
    "flags", [{"num_kv_blocks": 62}, {"kv_cache_memory": 62 << 16}, {"room": 50 << 16}, {"room": -1}]
)
def test_a_pool_holds_at_least_one_sequence(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="kv-cache-memory or num-kv-blocks, or lower max-model-len"):
        pool(**flags)


@pytest.mark.parametrize("flags", [{"num_kv_blocks": GIB // (1 << 16) + 1}, {"kv_cache_memory": 2 * GIB}])
def test_a_pool_larger_than_the_memory_is_refused(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"1\.1 GB are free: lower kv-cache-memory or num-kv-blocks"):
        pool(**flags)


def test_a_pool_larger_than_the_machine_is_refused_before_it_is_allocated() -> None:
    assert "num-kv-blocks gives 10000000 KV blocks" in refusal(checkpoint("llama"), num_kv_blocks=10_000_000)


def test_free_memory_is_plausible() -> None:
    assert 0 < free_memory() < 1 << 50


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_containers_limit_counts(limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are cached can be taken back, so a container that has read a model is not full."""
    monkeypatch.setattr(linux_process, "_CGROUP", tmp_path)
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / used).write_text("900000\n")
    for most, free in (("1000000\n", 100_000), ("800000\n", 0)):
        (tmp_path / limit).write_text(most)
        assert free_memory() == free
    (tmp_path / used).with_name("memory.stat").write_text("file 900\ninactive_file 700\ntotal_inactive_file 700\n")
    (tmp_path / limit).write_text("1000000\n")
    assert free_memory() == 100_700


@pytest.mark.parametrize("device", ["cuda", "sim:h100"])
def test_only_a_cpu_rounds_weights(device: str) -> None:
    refused = refusal(checkpoint("llama"), device=device, quantization="int8")
    assert f"device {device} does not support quantization int8: set it to auto" in refused


def test_weights_are_rounded_for_compiled_layers_only() -> None:
    refused = refusal(checkpoint("gpt-oss"), quantization="int4")
    assert refused == "quantization int4 needs a model that the CPU kernels compute: set it to auto"
