"""Compiled kernels: what a sequence gets does not depend, to the last bit, on how it is computed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from structlog.testing import capture_logs

from pagewire.kernels.cpu import build
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.models.config_json import DtypeSetting
from pagewire.shared.sampling_parameters import record
from pagewire.shared.settings.config import load
from tests.support.checkpoints import checkpoint, reference_logits
from tests.support.device import GREEDY, Driver, Row
from tests.support.waiting import PATIENCE

MANY_THREADS = 23
"""More than any other test uses: the kernels keep those that they have had."""
NAMES = ["llama", "llama-biased", "mistral", "qwen2-sliding", "qwen3", "opt"]


def text(seed: int, length: int) -> list[int]:
    return torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(driver: Driver, ids: list[int], chunk: int, slot: int = 0, beside: int = 0) -> torch.Tensor:
    """Logits of the last position. `beside` rows of other sequences share every step."""
    driver.add(slot, len(ids))
    for other in range(1, beside + 1):
        driver.add(other, 200)
    for step, start in enumerate(range(0, len(ids), chunk)):
        others = [Row(other, step, text(other, 1)) for other in range(1, beside + 1)]
        driver.step(*others[1:], Row(slot, start, ids[start : start + chunk]), *others[:1])
    return driver.logits[max(beside - 1, 0)].clone()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_neighbours_change_no_bit(name: str, dtype: DtypeSetting) -> None:
    ids = text(1, 90)
    expected = logits(Driver(checkpoint(name), dtype), ids, chunk=90)
    for chunk, beside in ((1, 0), (1, 3), (7, 5), (64, 1)):
        assert torch.equal(logits(Driver(checkpoint(name), dtype), ids, chunk, beside=beside), expected)


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "opt"])
@pytest.mark.parametrize("bits", [8, 4])
def test_chunks_neighbours_and_threads_change_no_bit_of_integers(name: str, bits: int) -> None:
    ids = text(1, 90)
    expected = logits(Driver(checkpoint(name), "bfloat16", bits=bits), ids, chunk=90)
    for chunk, beside, threads in ((1, 3, 1), (7, 5, 3), (64, 1, 2)):
        driver = Driver(checkpoint(name), "bfloat16", bits=bits, threads=threads)
        assert torch.equal(logits(driver, ids, chunk, beside=beside), expected)


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of the difference, relative to the spread of the exact logits."""
    return float((found - exact).square().mean().sqrt() / exact.std())


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma2"])
def test_chunks_neighbours_and_threads_change_no_bit_with_kv_in_int8(name: str) -> None:
    ids = text(1, 90)
    expected = logits(Driver(checkpoint(name), cached=torch.int8), ids, chunk=90)
    for chunk, beside, threads in ((1, 3, 1), (7, 5, 3), (64, 1, 2)):
        driver = Driver(checkpoint(name), cached=torch.int8, threads=threads)
        assert torch.equal(logits(driver, ids, chunk, beside=beside), expected)
    assert 0 < difference(expected, logits(Driver(checkpoint(name)), ids, chunk=90)) < 0.1


def test_a_family_that_transformers_builds_stays_close_with_kv_in_int8() -> None:
    """It has two groups of layers, one with windows, and sinks; only its attention is a compiled kernel."""
    ids = text(1, 90)
    exact = logits(Driver(checkpoint("gpt-oss")), ids, chunk=90)
    for chunk, beside in ((90, 0), (7, 3)):
        driver = Driver(checkpoint("gpt-oss"), cached=torch.int8)
        assert 0 < difference(logits(driver, ids, chunk, beside=beside), exact) < 0.1


def test_a_copy_of_blocks_in_int8_continues_like_the_original() -> None:
    ids = text(4, 61)
    driver = Driver(checkpoint("gemma2"), cached=torch.int8)
    sources, targets = driver.add(0, 70), driver.add(1, 70)
    driver.step(Row(0, 0, ids[:60]))
    driver.device.copy(sources, targets)
    driver.step(Row(0, 60, ids[60:]))
    expected = driver.logits.clone()
    driver.step(Row(1, 60, ids[60:]))
    assert torch.equal(driver.logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_rows_get_the_likeliest_token_whoever_is_beside(dtype: DtypeSetting) -> None:
    draws = record(temperature=5.0, key=3)
    banned = range(500)
    for other in (None, GREEDY, draws, record(min_length=90), record(num_candidates=4)):
        driver = Driver(checkpoint("llama"), dtype)
        driver.add(0, 30)
        rows = [Row(0, 0, text(1, 30))]
        if other is not None:
            driver.add(1, 30, other, banned if other["min_length"] else ())
            rows.append(Row(1, 0, text(2, 30)))
        tokens = driver.step(*rows)
        assert tokens[0] == int(driver.logits[0].argmax())
        if other is GREEDY:
            assert tokens[1] == int(driver.logits[1].argmax())
        if other is not None and other["min_length"]:
            assert tokens[1] >= 500


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(1, 200)
    expected = logits(Driver(checkpoint("llama")), ids, chunk=200)
    assert torch.equal(logits(Driver(checkpoint("llama"), threads=3), ids, chunk=50), expected)


@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 256])
def test_every_block_size_gives_transformers_logits(block_size: int) -> None:
    ids = text(2, 100)
    driver = Driver(checkpoint("mistral"), block_size=block_size)
    expected = reference_logits(checkpoint("mistral"), ids)[-1]
    torch.testing.assert_close(logits(driver, ids, chunk=33), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
def test_layers_in_one_call_equal_layers_one_by_one(cached: torch.dtype) -> None:
    ids = text(3, 40)
    for name in ("llama", "qwen3", "mistral", "gemma2", "olmo3"):  # the last two have two groups of layers
        driver = Driver(checkpoint(name), cached=cached)
        together = logits(driver, ids, chunk=9)
        assert driver.compiled is not None
        assert driver.compiled.decoder is not None
        driver.compiled.decoder = None
        driver.device.remove(0)
        assert torch.equal(logits(driver, ids, chunk=9), together)


def test_logits_take_no_new_memory_from_step_to_step() -> None:
    model = Driver(checkpoint("llama-tied")).compiled
    assert model is not None
    hidden = torch.randn(5, model.embedding.shape[1], generator=torch.Generator().manual_seed(0))
    expected = hidden @ model.embedding.float().T
    all_rows = model.logits(hidden)
    torch.testing.assert_close(all_rows, expected, rtol=1e-4, atol=1e-4)
    some = model.logits(hidden[2:4])
    torch.testing.assert_close(some, expected[2:4], rtol=1e-4, atol=1e-4)
    assert some.data_ptr() == all_rows.data_ptr()


SCRIPT = (
    "from pathlib import Path; from pagewire.services.executor.devices import open_device;"
    "from pagewire.shared.telemetry import logs; from pagewire.shared.settings.config import Settings, load;"
    "logs.configure(Settings(log_format='json'), service='executor');"
    "open_device(load({'num-kv-blocks': 40}, {}), Path(sys.argv[1])).close()"
)


def opened(before: str, **environ: str) -> list[dict[str, Any]]:
    """Opens the device in a process of its own, after a statement, and returns what it logs."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; {before}; {SCRIPT}", str(checkpoint("llama"))],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(build.__file__).parents[2],
        env=os.environ | environ,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("{")]


def test_triton_is_not_needed() -> None:
    lines = opened("sys.modules['triton'] = None")
    assert "kv_pool" in [line["event"] for line in lines]


def test_with_a_compiler_weights_and_kv_keep_their_dtype() -> None:
    with capture_logs() as lines:
        open_device(load({"num-kv-blocks": 40, "block-size": 16, "dtype": "bfloat16"}, {}), checkpoint("llama")).close()
    (pool,) = (line for line in lines if line["event"] == "kv_pool")
    layers, kv_heads, dim = 2, 2, 16
    assert pool["bytes"] == 40 * 16 * layers * kv_heads * (dim + dim) * torch.bfloat16.itemsize


def test_a_pool_in_int8_is_as_large_as_its_codes_and_scales() -> None:
    memory = 1 << 20
    settings = {"kv-cache-memory": memory, "block-size": 16, "kv-cache-dtype": "int8", "max-model-len": 64}
    with capture_logs() as lines:
        open_device(load(settings, {}), checkpoint("llama")).close()
    (pool,) = (line for line in lines if line["event"] == "kv_pool")
    layers, kv_heads, dim, scale = 2, 2, 16, torch.float32.itemsize
    of_block = 16 * layers * kv_heads * 2 * (dim + scale)
    assert (pool["blocks"], pool["bytes"]) == (memory // of_block, memory // of_block * of_block)


def test_threads_of_the_executor_do_not_spin() -> None:
    code = "import pagewire.services.executor.service, os; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(build.__file__).parents[2],
        env=environment,
        check=True,
    )
    assert ran.stdout.strip() == "passive"


def test_layers_that_run_together_follow_the_number_of_threads() -> None:
    driver = Driver(checkpoint("llama"), "bfloat16")
    expected = logits(driver, text(1, 90), chunk=90)
    model, kernels = driver.compiled, driver.kernels
    assert model is not None
    assert kernels is not None
    layers = model.decoder
    assert layers is not None

    def with_more_threads(*args: Any) -> torch.Tensor:
        kernels.threads = MANY_THREADS
        hidden = layers(*args)
        kernels.threads = 1
        return hidden

    before = len(os.listdir("/proc/self/task"))
    with patch.object(model, "decoder", with_more_threads):
        assert torch.equal(logits(driver, text(1, 90), chunk=90), expected)
    assert len(os.listdir("/proc/self/task")) > before
