"""Each kind of bad adapter is refused with one clear line, before anything of it is used."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.adapters.targets import Targets, targets_of
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.adapters.files import read_files
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.support.adapters import FAMILY_TARGETS, PREFIX, TARGETS, write_adapter
from tests.support.checkpoints import checkpoint

MAX_RANK = 16
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
Spoil = Callable[[Path], None]


def modules(family: str = "llama") -> Targets:
    config = read_config(checkpoint(family))
    return targets_of(build_model(config), tuple(config["architectures"]))


def configured(**fields: Any) -> Spoil:
    def spoil(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps(config | fields))

    return spoil


def retensored(change: Callable[[dict[str, torch.Tensor]], None]) -> Spoil:
    def spoil(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS)

    return spoil


def written(name: str, content: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).write_bytes(content)

    return spoil


def pickled(path: Path) -> None:
    (path / "adapter_model.bin").write_bytes(pickle.dumps({}))
    (path / WEIGHTS).unlink()


def cut(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def of_gpt2(path: Path) -> None:
    write_adapter(path, checkpoint("gpt2"), targets=FAMILY_TARGETS["gpt2"])


def removed(tensors: dict[str, torch.Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


def filled(tensors: dict[str, torch.Tensor], name: str, value: float) -> None:
    tensors[name].view(-1)[-1] = value


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.q.weight"] = tensors.pop(f"{Q}.lora_A.weight")


BAD: dict[str, tuple[Spoil, str]] = {
    "half a pair": (retensored(lambda t: removed(t, f"{Q}.lora_B.weight")), r"misses .*q_proj\.lora_B\.weight"),
    "other half": (retensored(lambda t: removed(t, f"{Q}.lora_A.weight")), r"misses .*q_proj\.lora_A\.weight"),
    "no pair of a target": (
        retensored(lambda t: removed(t, *(f"{Q}.lora_{half}.weight" for half in "AB"))),
        r"no tensors of model\.layers\.0\.self_attn\.q_proj, which its target_modules name",
    ),
    "no tensors": (retensored(lambda t: t.clear()), "has no tensors"),
    "unknown tensor": (retensored(renamed), r"a tensor model\.q\.weight, which is no factor"),
    "another base": (of_gpt2, "which the model does not have: is it for another model"),
    "another class": (configured(auto_mapping={"base_model_class": "GPT2LMHeadModel"}), "is for a GPT2LMHeadModel"),
    "wrong inputs": (
        retensored(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(8, 63)})),
        r"shape \[8, 63\], the model needs \[8, 64\]",
    ),
    "wrong outputs": (
        retensored(lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(65, 8)})),
        r"shape \[65, 8\], the model needs \[64, 8\]",
    ),
    "wrong rank": (
        retensored(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64)})),
        r"shape \[4, 64\], the model needs \[8, 64\]",
    ),
    "rank too large": (configured(r=32), "rank 32 .* set max-lora-rank to at least 32"),
    "rank of a pattern too large": (configured(rank_pattern={"q_proj": 64}), "rank 64 at .*q_proj"),
    "rank of zero": (configured(r=0), "cannot be used: .*r"),
    "NaN": (
        retensored(lambda t: filled(t, f"{Q}.lora_A.weight", torch.nan)),
        r"q_proj\.lora_A has numbers that are not finite",
    ),
    "infinity": (
        retensored(lambda t: filled(t, f"{Q}.lora_B.weight", torch.inf)),
        r"q_proj\.lora_B has numbers that are not finite",
    ),
    "integers": (
        retensored(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(8, 64, dtype=torch.int8)})),
        "has dtype int8: only float32",
    ),
    "alpha not finite": (
        written(CONFIG, b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1e999}'),
        "lora_alpha|out of range",
    ),
    "pickle": (pickled, r"adapter_model\.bin is a pickle, which could run code"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), r"has no file adapter_model\.safetensors"),
    "no config": (lambda path: (path / CONFIG).unlink(), r"has no file adapter_config\.json"),
    "no JSON": (written(CONFIG, b"{"), r"adapter_config\.json cannot be used"),
    "JSON list": (written(CONFIG, b"[]"), r"adapter_config\.json cannot be used"),
    "wrong type": (configured(lora_alpha="much"), r"adapter_config\.json cannot be used"),
    "huge config": (written(CONFIG, b" " * (1 << 20) + b"{}"), r"more than 1048576 bytes"),
    "huge header": (written(WEIGHTS, struct.pack("<Q", 1 << 60) + b"{}"), "a header of 1152921504606846976 bytes"),
    "empty weights": (written(WEIGHTS, b""), "header"),
    "cut weights": (cut, "is broken"),
    "another method": (configured(peft_type="IA3"), "peft_type IA3"),
    "DoRA": (configured(use_dora=True), "use_dora"),
    "modules to save": (configured(modules_to_save=["lm_head"]), "modules_to_save"),
    "PiSSA": (configured(init_lora_weights="pissa_niter_16"), "pissa_niter_16, which changes the base weights"),
    "OLoRA": (configured(init_lora_weights="olora"), "olora, which changes the base weights"),
    "LoftQ": (configured(init_lora_weights="loftq"), "loftq, which changes the base weights"),
    "biases": (configured(bias="lora_only"), "bias lora_only"),
    "biases of factors": (configured(lora_bias=True), "lora_bias"),
    "activated": (configured(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "replicated layers": (configured(layer_replication=[[0, 1]]), "layer_replication"),
    "tokens": (configured(trainable_token_indices=[1]), "trainable_token_indices"),
    "parameters": (configured(target_parameters=["experts"]), "target_parameters"),
    "classifier": (configured(task_type="SEQ_CLS"), "task_type SEQ_CLS"),
    "field of the future": (configured(use_xlora=True), "a field use_xlora, which is not known here"),
    "embedding": (
        retensored(
            lambda t: t.update(
                {f"{PREFIX}model.embed_tokens.lora_{half}.weight": torch.zeros(8, 8) for half in ("A", "B")}
            )
        ),
        r"changes model\.embed_tokens: only the products",
    ),
    "output layer": (
        retensored(
            lambda t: t.update({f"{PREFIX}lm_head.lora_{half}.weight": torch.zeros(8, 8) for half in ("A", "B")})
        ),
        "changes lm_head: only the products",
    ),
    "module that is no target": (configured(target_modules=TARGETS[:-1]), "which its target_modules do not name"),
    "excluded module": (configured(exclude_modules=["q_proj"]), "which its target_modules do not name"),
    "no expression": (configured(target_modules="(q_proj"), "is no expression"),
    "endless expression": (configured(target_modules=r"(.|.)*\d(.|.)*\d"), "takes too long to match"),
    "expression that takes long to compile": (
        configured(rank_pattern={"((((a{100}){100}){100}){1,100}){2,}": 4}),
        "is too large for an expression",
    ),
    "long expression": (configured(rank_pattern={"q" * 20_000 + "?": 4}), "is too large for an expression"),
    "deep expression": (configured(target_modules="(" * 3000 + ")" * 3000), "is nested too deeply"),
    "pattern of layers without a layer": (
        configured(layers_pattern="layers|(x)", layers_to_transform=[0]),
        "which its target_modules do not name",
    ),
    "alpha beyond float32": (configured(lora_alpha=1e300), r"scales model\.layers\.0\.mlp\.down by 1\.25e\+299"),
    "long name": (configured(**{"x" * 5000: 1}), "a field x{100}, which is not known here"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_is_refused_with_one_line(kind: str, tmp_path: Path) -> None:
    spoil, message = BAD[kind]
    path = write_adapter(tmp_path / "a", checkpoint("llama"))
    spoil(path)
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_adapter(read_files(path), modules(), MAX_RANK)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
    assert str(tmp_path) not in str(refused.value)


def test_a_pattern_of_layers_may_have_groups(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"layers_pattern": "(layers|blocks)", "layers_to_transform": [0, 1]}
    path = write_adapter(tmp_path / "a", checkpoint("llama"), **fields)
    assert read_adapter(read_files(path), modules(), MAX_RANK).updates


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder of an adapter"):
        read_files(tmp_path / "missing")


def test_adapters_of_experts_are_refused_and_adapters_of_attention_taken(tmp_path: Path) -> None:
    attention = TARGETS[:4]
    path = write_adapter(tmp_path / "a", checkpoint("qwen3-moe"), targets=attention)
    adapter = read_adapter(read_files(path), modules("qwen3-moe"), MAX_RANK)
    assert len(adapter.updates) == 4
    retensored(
        lambda t: t.update(
            {f"{PREFIX}model.layers.0.mlp.gate.lora_{half}.weight": torch.zeros(8, 8) for half in ("A", "B")}
        )
    )(path)
    with pytest.raises(ConfigurationError, match=r"changes model\.layers\.0\.mlp\.gate: only the products"):
        read_adapter(read_files(path), modules("qwen3-moe"), MAX_RANK)


def test_the_digest_is_that_of_the_content_alone(tmp_path: Path) -> None:
    one = read_files(write_adapter(tmp_path / "a", checkpoint("llama"), seed=1))
    same = read_files(write_adapter(tmp_path / "b", checkpoint("llama"), seed=1))
    others = [
        read_files(write_adapter(tmp_path / "c", checkpoint("llama"), seed=2)),
        read_files(write_adapter(tmp_path / "d", checkpoint("llama"), seed=1, alpha=9.0)),
    ]
    assert one.digest == same.digest
    assert len({one.digest, *(other.digest for other in others)}) == 3
