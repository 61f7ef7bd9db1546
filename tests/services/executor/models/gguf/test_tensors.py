"""GGUF files give the parameters, and the text, of the model that they were made from."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM

from pagewire.services.executor.models.gguf.tensors import dequantize, open_gguf
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import TENSOR_TYPES, TensorType
from pagewire.shared.models.model_folder import read_config
from tests.services.executor.conftest import Drive
from tests.support.checkpoints import CONFIGS, checkpoint
from tests.support.gguf_files import KINDS, from_checkpoint, random_blocks, random_model

_FORMATS = ("llama", "mistral", "qwen2", "qwen3")
_NOT = {"qwen2-sliding", "qwen2-moe", "qwen3-moe", "llama-yarn-mscale"}
NAMED = [name for name in CONFIGS if name.startswith(_FORMATS) and name not in _NOT]
"""Checkpoints that a GGUF file can hold: it has no field for a sliding window of Qwen2, or for YaRN's `mscale`."""
PLAIN = ("F32", "F16", "BF16")
RANDOM = [*(("llama", kind) for kind in KINDS), ("qwen2", "Q4_K"), ("qwen3", "Q8_0")]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "Q4_1": torch.bfloat16}


def kind_of(name: str) -> TensorType:
    return next(kind for kind in TENSOR_TYPES.values() if kind.name == name)


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(path, read_config(path), "float32").named_parameters())


def test_block_sizes_equal_the_gguf_packages() -> None:
    for number, kind in TENSOR_TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, kind.block, kind.size) == (theirs.name, *GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLAIN])
def test_random_blocks_become_the_numbers_of_the_package(kind: str) -> None:
    blocks = random_blocks(kind, 96, scale=1.0).reshape(12, -1)
    expected = quants.dequantize(blocks, GGMLQuantizationType[kind])
    ours = dequantize(blocks, kind_of(kind)).numpy()
    assert ours.shape == expected.shape
    assert (ours.view(np.int32) == expected.view(np.int32)).all()


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_numbers_stay_unchanged(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    packed = quants.quantize(values, GGMLQuantizationType[kind])
    expected = quants.dequantize(packed, GGMLQuantizationType[kind])
    assert (dequantize(packed.view(np.uint8), kind_of(kind)).float().numpy() == expected).all()


@pytest.mark.parametrize("name", NAMED)
def test_a_file_holds_the_parameters_of_the_folder(tmp_path: Path, name: str) -> None:
    expected, loaded = parameters(checkpoint(name)), parameters(from_checkpoint(name, tmp_path / "model.gguf"))
    assert expected.keys() == loaded.keys()
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("name", NAMED)
def test_a_file_has_the_configuration_of_the_folder(tmp_path: Path, name: str) -> None:
    ours, theirs = (
        load_model(path, read_config(path), "float32")
        for path in (from_checkpoint(name, tmp_path / "model.gguf"), checkpoint(name))
    )
    assert ours.spec == theirs.spec
    ids, positions = torch.arange(1, 60), torch.arange(59)

    def first(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k.repeat_interleave(q.shape[1] // k.shape[1], 1) + v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    torch.testing.assert_close(ours(ids, positions, first), theirs(ids, positions, first), rtol=1e-5, atol=1e-5)


def test_parts_hold_the_parameters_of_the_whole(tmp_path: Path) -> None:
    from_checkpoint("llama", tmp_path / "model.gguf", split=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    expected, loaded = parameters(checkpoint("llama")), parameters(parts[0])
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_large_tensors_are_unpacked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = from_checkpoint("llama-biased", tmp_path / "model.gguf", "Q8_0")
    whole = parameters(path)
    monkeypatch.setattr("pagewire.services.executor.models.gguf.tensors.CHUNK", 200)
    parts = parameters(path)
    assert all(torch.equal(parts[key], value) for key, value in whole.items())


@pytest.mark.parametrize(("architecture", "kind"), RANDOM)
def test_greedy_text_equals_transformers(tmp_path: Path, drive: Drive, architecture: str, kind: str) -> None:
    path = random_model(tmp_path / "model.gguf", architecture, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    driver, prompt = drive(path), [5, 77, 400, 12, 3]
    driver.add(0, 40)
    generated = driver.generate(0, prompt, 24)
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-4
    assert clear.sum() > 20
    assert len(set(generated)) > 8
    assert torch.equal(best.indices[:, 0][clear], torch.tensor(generated)[clear])


@pytest.mark.parametrize("kind", DTYPES)
def test_the_dtype_is_that_of_the_file_or_bf16(tmp_path: Path, kind: str) -> None:
    path = from_checkpoint("llama", tmp_path / "model.gguf", kind)
    model = load_model(path, read_config(path), "auto")
    assert {value.dtype for value in model.parameters()} == {DTYPES[kind]}


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_integers_are_the_numbers_that_are_read(tmp_path: Path, part: str) -> None:
    """In the order of the checkpoint's rows, which the file has in another one for queries and keys."""
    path, name = from_checkpoint("llama", tmp_path / "m.gguf", "Q4_0"), f"model.layers.1.self_attn.{part}_proj.weight"
    with open_gguf(path, [name]) as source:
        integers, whole = source.integers(name), torch.empty(source.shape(name))
        source.read({name: whole})
        assert integers is not None
        assert torch.equal(integers.dequantize(), whole)


def test_a_tensor_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    path = from_checkpoint("qwen2", tmp_path / "model.gguf")
    with pytest.raises(ConfigurationError, match="misses tensors"):
        load_model(path, read_config(path) | {"num_hidden_layers": 3}, "auto")


def test_ignored_keys_are_named_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = from_checkpoint("llama", tmp_path / "model.gguf", metadata={"llama.attention.scale": 0.5})
    load_model(path, read_config(path), "auto")
    assert "gguf_keys_ignored" in (printed := capsys.readouterr().out)
    assert "attention.scale" in printed
    path = from_checkpoint("llama", tmp_path / "other.gguf", metadata={"llama.vocab_size": 512})
    load_model(path, read_config(path), "auto")
    assert "gguf_keys_ignored" not in capsys.readouterr().out


LOAD = """
import sys
from pathlib import Path
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.models.model_folder import read_config
path = Path(sys.argv[1])
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
load_model(Path(sys.argv[2]), read_config(Path(sys.argv[2])), "float32")
before = peak()
model = load_model(path, read_config(path), "float32")
print(peak() - before, sum(value.nbytes for value in model.parameters()))
"""


def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    path = random_model(tmp_path / "big.gguf", "llama", "Q6_K", width=1024, rows=40_960)
    small = from_checkpoint("llama", tmp_path / "small.gguf", "Q8_0")
    done = subprocess.run([sys.executable, "-c", LOAD, path, small], capture_output=True, text=True, check=True)
    grown, final = map(int, done.stdout.splitlines()[-1].split())  # the lines before are of the log
    assert final > 300 << 20
    assert grown < 1.3 * final
