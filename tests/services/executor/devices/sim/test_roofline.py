"""The roofline against numbers worked out by hand."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import (
    BYTES,
    GPUS,
    PROMPT_TILES,
    Efficiency,
    Gpu,
    ModelShape,
    Roofline,
    shape_of,
)
from pagewire.shared.errors import ConfigurationError

BENCH = Path(__file__).parents[5] / "bench"
GPU = Gpu(flops=1000.0, bandwidth=100.0, memory=1 << 20, link=50.0, issue=float("inf"), arch=90)
PLAIN = Efficiency(compute=1.0, bandwidth=1.0, link=1.0, all_reduce=0.25, launch=0.5, layer=0.0, reserved=0)
SHAPE = ModelShape(
    hidden=10, heads=4, kv_heads=2, head_dim=5, vocab=30, windows=(0, 0, 0), layer_weights=600, weights=1000
)
"""3 layers. KV of a position and layer: 2 * 2 heads * 5 * 2 bytes = 40 bytes."""


def seconds(roofline: Roofline, *rows: tuple[int, int, bool]) -> float:
    num_computed_tokens, query_lens, samples = zip(*rows, strict=True)
    return roofline.seconds(np.array(num_computed_tokens), np.array(query_lens), np.array(samples))


def test_a_decode_reads_every_weight_and_the_context() -> None:
    layers = 600 * 2 / 100
    attention = 3 * 40 * (8 + 1) / 100  # it reads 8 positions, its own included, and writes one
    head = 30 * 10 * 2 / 100
    assert seconds(Roofline(SHAPE, GPU, 1, PLAIN), (7, 1, True)) == pytest.approx(0.5 + layers + attention + head)


def test_a_long_chunk_is_bound_by_arithmetic_and_samples_nothing() -> None:
    layers = 2 * 100 * 600 / 1000
    seen = 100 * 20 + 100 * 101 / 2  # position 20 + i sees 20 + i + 1 positions
    attention = 3 * 4 * 4 * 5 * seen / 1000
    assert seconds(Roofline(SHAPE, GPU, 1, PLAIN), (20, 100, False)) == pytest.approx(0.5 + layers + attention)


def test_rows_share_the_weights_but_not_the_context() -> None:
    roofline = Roofline(SHAPE, GPU, 1, PLAIN)
    one, two = seconds(roofline, (50, 1, True)), seconds(roofline, (50, 1, True), (50, 1, True))
    assert two - one == pytest.approx(3 * 40 * 52 / 100)


def test_efficiencies_divide_the_peaks() -> None:
    slow = Efficiency(compute=0.5, bandwidth=0.25, link=1.0, all_reduce=0.0, launch=0.0, layer=0.0, reserved=0)
    fast = Efficiency(compute=1.0, bandwidth=1.0, link=1.0, all_reduce=0.0, launch=0.0, layer=0.0, reserved=0)
    free = replace(SHAPE, windows=())  # attention of prompts has costs of its own
    for rows, factor in ([(7, 1, True)], 4), ([(0, 100, False)], 2):
        ratio = seconds(Roofline(free, GPU, 1, slow), *rows) / seconds(Roofline(free, GPU, 1, fast), *rows)
        assert ratio == pytest.approx(factor)


def test_attention_of_a_prompt_takes_the_time_of_its_instructions_too() -> None:
    """A slower kernel makes a slower step."""
    slow = replace(GPU, issue=4.0)
    seen = 100 * 20 + 100 * 101 / 2
    flops = 3 * 4 * 4 * 5 * seen
    instructions = flops * PROMPT_TILES[90].instructions * 8 / (4 * 128 * 64 * 128)
    rows = (20, 100, False)
    more = seconds(Roofline(SHAPE, slow, 1, PLAIN), rows) - seconds(Roofline(SHAPE, GPU, 1, PLAIN), rows)
    assert more == pytest.approx(instructions / 4)


def test_a_window_bounds_the_positions_that_a_query_sees_and_a_row_reads() -> None:
    sliding = ModelShape(10, 4, 2, 5, 30, windows=(16,), layer_weights=0, weights=0)
    roofline = Roofline(sliding, GPU, 1, PLAIN)
    assert seconds(roofline, (1000, 1, False)) == pytest.approx(0.5 + 40 * (16 + 1) / 100)
    seen = (11 + 12 + 13 + 14 + 15 + 16) + 34 * 16  # the chunk begins below the window and grows past it
    assert seconds(roofline, (10, 40, False)) == pytest.approx(0.5 + 4 * 4 * 5 * seen / 1000)


def test_tensor_parallelism_divides_work_and_adds_two_sums_per_layer() -> None:
    single, double = Roofline(SHAPE, GPU, 1, PLAIN), Roofline(SHAPE, GPU, 2, PLAIN)
    work = seconds(single, (20, 100, True)) - 0.5
    ring = 2 * (2 - 1) / 2 * 100 * 10 * BYTES / 50
    assert seconds(double, (20, 100, True)) == pytest.approx(0.5 + work / 2 + 3 * 2 * (0.25 + ring))


def test_kv_heads_are_copied_beyond_their_number() -> None:
    assert [Roofline(SHAPE, GPU, degree).kv_bytes for degree in (1, 2, 4, 8)] == [120, 120, 240, 480]


def test_the_pool_gets_the_memory_that_weights_and_activations_leave() -> None:
    roofline = Roofline(SHAPE, GPU, 2, Efficiency(reserved=1000))
    assert roofline.kv_memory(0.5) == 2 * ((1 << 19) - 1000) - 1000 * BYTES
    assert Roofline(shape_of(SHAPES["llama-3-70b"]), GPUS["h100"]).kv_memory(0.9) < 0


@pytest.mark.parametrize(
    ("name", "weights", "kv_bytes"),
    [
        ("llama-3-8b", 8_030_261_248, 2 * 32 * 8 * 128 * 2),
        ("llama-3-70b", 70_553_706_496, 2 * 80 * 8 * 128 * 2),
        ("llama-2-70b", 68_976_648_192, 2 * 80 * 8 * 128 * 2),
        ("qwen3-0.6b", 596_049_920, 2 * 28 * 8 * 128 * 2),
        ("qwen3-14b", 14_768_307_200, 2 * 40 * 8 * 128 * 2),
    ],
)
def test_published_models_have_the_published_sizes(name: str, weights: int, kv_bytes: int) -> None:
    shape = shape_of(SHAPES[name])
    assert shape.weights == weights
    assert Roofline(shape, GPUS["h100"]).kv_bytes == kv_bytes


def test_the_embedding_is_no_work_and_a_tied_head_is() -> None:
    tied, untied = shape_of(SHAPES["qwen3-0.6b"]), shape_of(SHAPES["qwen3-14b"])
    assert tied.weights - tied.layer_weights == 151936 * 1024
    assert untied.weights - untied.layer_weights == 2 * 151936 * 5120
    assert tied.vocab == untied.vocab == 151936


def test_one_stream_of_llama_on_an_h100_is_bound_by_its_weights() -> None:
    took = seconds(Roofline(shape_of(SHAPES["llama-3-8b"]), GPUS["h100"]), (500, 1, True))
    read = (8_030_261_248 - 128256 * 4096) * 2  # the input embedding is looked up, not read
    assert took == pytest.approx(150e-6 + 32 * 26e-6 + read / (0.85 * 3.35e12), rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {}}, "quantized"),
    ],
)
def test_shapes_that_cannot_be_timed_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shape_of(SHAPES["llama-3-8b"] | change)


def test_the_small_kernels_of_each_layer_take_their_time() -> None:
    work = seconds(Roofline(SHAPE, GPU, 1, PLAIN), (7, 1, True))
    assert seconds(Roofline(SHAPE, GPU, 1, replace(PLAIN, layer=2.0)), (7, 1, True)) == pytest.approx(work + 3 * 2.0)


def test_steps_take_about_as_long_as_on_an_h200() -> None:
    """Decodes of 128 sequences are 16 % too fast: products of so many rows take longer than their weights' bytes."""
    measured = msgspec.json.decode((BENCH / "results" / "gpu-h200.json").read_bytes())["parts"]
    roofline = Roofline(shape_of(SHAPES["llama-3-8b"]), GPUS["h200"])
    errors = []
    for cell in measured["decode"]:
        simulated = seconds(roofline, *[(cell["context"] - 32, 1, True)] * cell["rows"])
        errors.append(1e3 * simulated / statistics.median(cell["wall_ms"]) - 1)
    for cell in measured["prefill"]:
        errors.append(1e3 * seconds(roofline, (0, cell["tokens"], True)) / statistics.median(cell["device_ms"]) - 1)
    assert max(map(abs, errors)) < 0.17
    assert abs(statistics.median(errors)) < 0.03
