"""Models that also take images serve text, as transformers' whole model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.stored_names import decoder_names
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import eos_ids, read_config
from pagewire.shared.models.text_config import text_part
from tests.services.executor.conftest import Drive
from tests.support.checkpoints import VOCABULARY, tokenizer
from tests.support.device import Row

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "mistral3": (TEXT | {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}),
    "gemma3": (
        TEXT | {"model_type": "gemma3_text", "sliding_window": 24, "query_pre_attn_scalar": 16},
        VISION | {"model_type": "siglip_vision_model"},
    ),
    "idefics3": (TEXT | {"model_type": "llama"}, VISION),
    "qwen2_5_vl": (TEXT | {"rope_parameters": MROPE}, QWEN | {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN | {"deepstack_visual_indexes": [0]},
    ),
}
"""Kinds of models: configurations of the decoder and of what reads images. They name their tensors in four ways."""


def write(kind: str, folder: Path) -> Any:
    """Writes a tiny checkpoint; returns transformers' model of it."""
    text, vision = KINDS[kind]
    ids = {"image_token_id": VOCABULARY - 1, "image_token_index": VOCABULARY - 1}
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=vision, **ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_text_equal_the_whole_models(drive: Drive, tmp_path: Path, kind: str) -> None:
    model = write(kind, tmp_path)
    ids = torch.randint(3, VOCABULARY - 2, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(input_ids=ids[None], attention_mask=torch.ones(1, 40, dtype=torch.long)).logits[0]
    driver = drive(tmp_path)
    driver.add(0, 40)
    for start in (0, 20):
        driver.step(Row(0, start, ids[start : start + 20].tolist()))
        torch.testing.assert_close(driver.logits[0], expected[start + 19], rtol=1e-4, atol=1e-4)


def test_a_setting_that_publishers_leave_out_is_the_familys_default() -> None:
    published = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    text = text_part(whole | {"text_config": published, "vision_config": {}, "torch_dtype": "bfloat16"})
    assert text["architectures"] == ["Gemma3ForCausalLM"]
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]) == (8, 4, 256)
    assert (text["eos_token_id"], text["torch_dtype"], text["tie_word_embeddings"]) == ([1, 106], "bfloat16", True)


def test_the_ends_of_text_are_found(tmp_path: Path) -> None:
    write("llava", tmp_path)
    assert eos_ids(tmp_path) == {0, 2}  # of tokenizer_config.json and of config.json


@pytest.mark.parametrize("kind", ["paligemma", "mllama"])
def test_decoders_that_do_not_generate_from_text_alone_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(kind, architectures=["OtherForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="OtherForConditionalGeneration is not supported"):
        load_model(tmp_path, read_config(tmp_path), "auto")


def test_a_plain_checkpoint_keeps_its_names() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert decoder_names(names) == {name: name for name in names}
    assert decoder_names([*names, "visual.merger.mlp.0.weight"]).keys() == set(names)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_that_is_not_tied_keeps_its_own_output(tmp_path: Path, *, tied: bool) -> None:
    """Where the decoder's part of config.json alone says whether it is."""
    write("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = tied
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)["tie_word_embeddings"] is tied
