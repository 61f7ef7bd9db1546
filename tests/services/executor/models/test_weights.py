"""A model folder that cannot be used is refused with one clear line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint

Tensors = dict[str, torch.Tensor]


def copy(name: str, to: Path) -> Path:
    shutil.copytree(checkpoint(name), to, dirs_exist_ok=True)
    return to


def edit_config(folder: Path, **changes: Any) -> None:
    config = read_config(folder) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_model(folder, read_config(folder), "auto")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def parameters(folder: Path) -> Tensors:
    return dict(load_model(folder, read_config(folder), "auto").named_parameters())


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    edit_weights(
        folder, lambda tensors: [tensors.pop(f"model.layers.1.mlp.{part}_proj.weight") for part in ("up", "down")]
    )
    message = refusal(folder)
    assert "misses tensors: model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.up_proj.weight" in message


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    edit_weights(folder, lambda tensors: tensors.update({f"model.extra.{i}": torch.zeros(1) for i in range(5)}))
    assert "unexpected tensors: model.extra.0, model.extra.1, model.extra.2 and 2 more" in refusal(folder)


def test_a_bias_that_the_configuration_denies_is_unexpected(tmp_path: Path) -> None:
    folder = copy("llama-biased", tmp_path)
    edit_config(folder, mlp_bias=False)
    assert "mlp.down_proj.bias" in refusal(folder)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    assert "tensor model.norm.weight has shape [63], config.json needs [64]" in refusal(folder)


def test_a_part_of_a_packed_projection_has_its_own_shape(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    assert f"tensor {name} has shape [64, 64], config.json needs [32, 64]" in refusal(folder)


def test_an_unexpected_dtype_is_refused(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert "has dtype I8" in refusal(folder)


@pytest.mark.parametrize("left", [0, 5, 200, 20_000])
def test_a_truncated_file_is_broken(tmp_path: Path, left: int) -> None:
    folder = copy("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert "model.safetensors is broken" in refusal(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = copy("llama-sharded", tmp_path)
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert f"has no {gone.name}" in refusal(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    folder = copy("llama-sharded", tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    assert "does not map tensors to files" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ""])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = copy("llama-sharded", tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "outside the folder" in refusal(folder)


def test_an_old_buffer_is_ignored(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert name not in parameters(folder)


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: Path) -> None:
    folder = copy("llama-tied", tmp_path)
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert "lm_head.weight" not in parameters(folder)
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from the embedding" in refusal(folder)


def test_an_untied_head_must_be_stored(tmp_path: Path) -> None:
    folder = copy("llama-tied", tmp_path)
    edit_config(folder, tie_word_embeddings=False)
    assert "misses tensors: lm_head.weight" in refusal(folder)


def test_shards_hold_the_same_parameters_as_one_file(tmp_path: Path) -> None:
    merged: Tensors = {}
    for shard in checkpoint("llama-sharded").glob("*.safetensors"):
        merged |= load_file(shard)
    (tmp_path / "config.json").write_bytes((checkpoint("llama-sharded") / "config.json").read_bytes())
    save_file(merged, tmp_path / "model.safetensors")
    expected, loaded = parameters(tmp_path), parameters(checkpoint("llama-sharded"))
    assert expected.keys() == loaded.keys()
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(("setting", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_every_parameter_has_the_dtype_that_is_set(setting: Any, dtype: torch.dtype) -> None:
    folder = checkpoint("llama")
    model = load_model(folder, read_config(folder), setting)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_parts_without_an_index_are_read(tmp_path: Path) -> None:
    folder = copy("llama-sharded", tmp_path)
    expected = parameters(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert all(torch.equal(value, expected[name]) for name, value in parameters(folder).items())
    min(folder.glob("model-*.safetensors")).unlink()
    assert "lacks part 1 of" in refusal(folder)


def test_weights_in_the_format_of_pytorch_alone_are_refused_by_name(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in refusal(folder)


def test_a_pointer_in_place_of_the_weights_is_named(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in refusal(folder)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "llama"])
def test_names_without_the_prefix_of_the_model_are_known(tmp_path: Path, name: str) -> None:
    """As the hub's GPT-2 has them."""
    folder = copy(name, tmp_path)
    expected = parameters(folder)

    def without_prefix(tensors: Tensors) -> None:
        for stored in list(tensors):
            prefix, _, rest = stored.partition(".")
            if prefix in {"transformer", "gpt_neox", "model"}:
                tensors[rest] = tensors.pop(stored)

    edit_weights(folder, without_prefix)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(folder).items())
