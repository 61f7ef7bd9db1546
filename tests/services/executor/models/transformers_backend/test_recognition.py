"""A model of transformers whose layers are those of this project is served by these, and no other one is."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.gathered_attention import GatheredPool
from pagewire.services.executor.devices.self_test import SelfTest, prove
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.transformers_backend.loading import finish
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.services.executor.models.transformers_backend.recognition import recognize
from tests.families.tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def built(family: str, **changes: Any) -> TransformersLM:
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return finish(tiny_model(config))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "seed_oss",  # biases
        "gemma2",  # norms around, caps, windows, scaled embeddings
        "olmo2",  # norms behind, heads normalised together
        "qwen3",  # heads normalised
    ],
)
def test_layers_are_recognized_and_the_model_still_works(family: str) -> None:
    model = built(family)
    test = SelfTest(model, GatheredPool, 8, 64)
    decoder = recognize(model.model, model.spec)
    assert decoder is not None
    assert max(test.error(decoder), test.far_error(decoder), test.error(model)) < 1e-5
    theirs = {parameter.untyped_storage().data_ptr() for parameter in model.model.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()} == theirs


def test_a_recognized_model_runs_on_the_compiled_kernels() -> None:
    model = built("seed_oss")
    kernels = CpuKernels(build.load(), 1)
    backend = partial(CompiledBackend, kernels)
    test = SelfTest(model, backend, 8, 64)
    compiled = CompiledLM(prove(model, backend, 8, 64), kernels, 64)
    assert compiled.decoder is not None
    assert test.error(compiled) < 1e-5


@pytest.mark.parametrize("family", ["helium", "ernie4_5"])  # they rotate other pairs
def test_a_family_that_computes_something_else_stays_with_transformers(family: str) -> None:
    model = built(family)
    assert recognize(model.model, model.spec) is not None
    assert prove(model, GatheredPool, 8, 64) is model


@pytest.mark.parametrize("family", ["gpt_neox", "gpt_oss", "starcoder2"])
def test_other_modules_are_not_recognized(family: str) -> None:
    model = built(family)
    assert recognize(model.model, model.spec) is None


def test_a_difference_far_into_the_context_is_found() -> None:
    """Ministral 3 scales queries by their position, from a position on that the texts of the test do not reach."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.5,
    }
    model = built("ministral3", rope_parameters=rope)
    test = SelfTest(model, GatheredPool, 8, 256)
    decoder = recognize(model.model, model.spec)
    assert decoder is not None
    assert test.error(decoder) < 1e-5
    assert test.far_error(decoder) > 1e-3
    assert prove(model, GatheredPool, 8, 256) is model


def test_a_native_decoder_is_returned() -> None:
    assert isinstance(prove(built("cwm"), GatheredPool, 8, 64), DecoderLM)
    assert torch.is_inference_mode_enabled() is False
