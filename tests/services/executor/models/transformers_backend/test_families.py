"""Ten families of every kind of attention, as `transformers` builds them: chunked, packed and decoded on the device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from pagewire.services.executor.devices.gathered_attention import GatheredPool
from pagewire.services.executor.devices.self_test import SelfTest
from pagewire.services.executor.models.transformers_backend.loading import load_decoder
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.families.sweep import cases, save
from tests.families.tiny import tiny_config
from tests.services.executor.conftest import Drive
from tests.support.device import Row

TEN = (
    "gpt_neox",  # partial rotary
    "gpt2",  # learned positions
    "phi3",  # packed projections
    "gemma2",  # soft caps of scores and logits, windows
    "gemma3_text",  # norms of queries and keys, two kinds of rotation
    "gemma4_text",  # layers with heads of different sizes
    "gpt_oss",  # sinks, experts
    "deepseek_v3",  # latent attention: values smaller than keys
    "llama4_text",  # chunks
    "granite",  # scales of its own
)
LENGTHS, TOKENS = (17, 30), 12


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("family", TEN)
def test_tokens_equal_transformers_generate(family: str, drive: Drive, tmp_path: Path) -> None:
    model = save(tiny_config(family), tmp_path)
    first, second = cases(model, LENGTHS, TOKENS)
    driver = drive(tmp_path)
    for slot, case in enumerate((first, second)):
        driver.add(slot, len(case.prompt) + TOKENS)
    driver.step(Row(0, 0, first.prompt[:9], samples=False), Row(1, 0, second.prompt[:14], samples=False))
    outputs = [[token] for token in driver.step(Row(0, 9, first.prompt[9:]), Row(1, 14, second.prompt[14:]))]
    while len(outputs[0]) < TOKENS:
        texts = (first.prompt + outputs[0], second.prompt + outputs[1])
        tokens = driver.step(*(Row(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts)))
        for row, token in zip(outputs, tokens, strict=True):
            row.append(token)
    assert outputs == [first.tokens, second.tokens]


def test_the_self_test_finds_a_wrong_constant(tmp_path: Path) -> None:
    """Here the scale: what the probe would have to miss for a wrong answer."""
    save(tiny_config("granite"), tmp_path)
    model = load_decoder(tmp_path, read_config(tmp_path), torch.float32)
    assert SelfTest(model, GatheredPool, 8, 64).run(model) < 1e-5
    layers = tuple(replace(layer, scale=layer.scale * 0.9) for layer in model.spec.layers)
    model.spec = replace(model.spec, layers=layers)
    with pytest.raises(ConfigurationError, match=r"granite.*differ"):
        SelfTest(model, GatheredPool, 8, 64).run(model)


def test_a_scale_that_depends_on_the_position_is_that_of_the_model(drive: Drive, tmp_path: Path) -> None:
    """Llama 4 scales queries beyond `floor_scale`, and takes their positions from the length of its cache."""
    config = tiny_config("llama4_text")
    config.floor_scale, config.attn_scale = 8, 2.0
    model = save(config, tmp_path)
    (case,) = cases(model, (30,), TOKENS)
    driver = drive(tmp_path)
    driver.add(0, len(case.prompt) + TOKENS)
    assert driver.generate(0, case.prompt, TOKENS, chunk=11) == case.tokens
    loaded = load_decoder(tmp_path, read_config(tmp_path), torch.float32)
    assert SelfTest(loaded, GatheredPool, 8, 64).run(loaded) < 1e-5
