"""Files of models, which come from strangers: they are read, or refused in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pagewire.services.executor.models.registry import load_model
from pagewire.services.tokenizer.encoder import to_ids
from pagewire.services.tokenizer.validation.generation_config import generation_defaults
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings
from tests.fuzz.fuzzing import edited, encode_json, fuzz, mutated
from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import from_checkpoint
from tests.support.quantized import awq, compressed_tensors, fp8, gptq, modelopt, write


def refused_or(read: Callable[[], object]) -> None:
    """Allows refusals of one line alone."""
    try:
        read()
    except ConfigurationError as error:
        assert str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), copy)
    return copy


def read_model(path: Path) -> None:
    config = model_folder.read_config(path)
    model_folder.max_model_len(Settings(), config)
    model_folder.eos_ids(path)
    generation_defaults(model_folder.read_generation_config(path), 300)
    model_folder.revision(path)
    load_model(path, config, "auto")


CONFIG = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0},
    "quantization_config": {"quant_method": "fp8"},
    "sliding_window": 8,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
    "text_config": {"model_type": "llama", "hidden_size": 64},
}


def test_any_configuration_is_read_or_refused(folder: Path) -> None:
    sample = model_folder.read_config(folder)

    def check(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        refused_or(lambda: read_model(folder))

    samples = [sample, sample | CONFIG]
    whole = edited(samples, list(CONFIG)).map(encode_json)
    known = [encode_json(sample | {"model_type": [], "architectures": ["OtherForCausalLM"]})]
    fuzz(st.one_of(whole, whole, mutated([encode_json(sample)])), check, known, batch=20)


def test_any_generation_config_is_read_or_refused(folder: Path) -> None:
    sample = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 64,
        "eos_token_id": [1, 2],
        "do_sample": True,
    }

    def check(data: bytes) -> None:
        (folder / "generation_config.json").write_bytes(data)
        refused_or(lambda: generation_defaults(model_folder.read_generation_config(folder), 300))
        refused_or(lambda: model_folder.eos_ids(folder))

    fuzz(st.one_of(edited([sample]).map(encode_json), mutated([encode_json(sample)])), check)


def test_any_weights_are_read_or_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    config = model_folder.read_config(folder)

    def check(head: bytes) -> None:
        file.write_bytes(head + data[len(header) :])
        refused_or(lambda: load_model(folder, config, "auto"))

    fuzz(mutated([header], [b"F64", b"BF16", b"[0,0]", b"-1", b"9" * 20, b"{}"]), check, batch=20)


QUANTIZED = {
    "gptq": gptq(4),
    "awq": awq(),
    "fp8": fp8((32, 32)),
    "modelopt": modelopt("NVFP4"),
    "packed": compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_quantized_weights_are_read_or_refused(name: str, tmp_path: Path) -> None:
    folder = write(checkpoint("llama"), tmp_path, QUANTIZED[name])
    file, sample = folder / "model.safetensors", QUANTIZED[name].config
    data = file.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    config = model_folder.read_config(folder)

    def check(choice: tuple[bytes, bytes]) -> None:
        settings, head = choice
        (folder / "config.json").write_bytes(settings)
        file.write_bytes(head + data[len(header) :])
        refused_or(lambda: load_model(folder, model_folder.read_config(folder), "auto"))

    settings = st.tuples(
        edited([sample]).map(lambda edit: encode_json(config | {"quantization_config": edit})), st.just(header)
    )
    headers = st.tuples(
        st.just(encode_json(config)), mutated([header], [b"I32", b"[0,0]", b"g_idx", b"-1", b"_scale", b"F8_E5M2"])
    )
    known = [(encode_json(config | {"quantization_config": sample | {"quant_method": "\n"}}), header)]
    fuzz(st.one_of(settings, headers), check, known, batch=5, share=0.3)


def test_any_tokenizer_is_read_or_refused(folder: Path) -> None:
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    originals = [file.read_bytes() for file in files]

    def check(choice: tuple[int, bytes]) -> None:
        which, data = choice
        for file, original in zip(files, originals, strict=True):
            file.write_bytes(original)
        files[which].write_bytes(data)

        def read() -> None:
            to_ids(load_tokenizer(folder).backend)(["Once upon a time"], True)

        refused_or(read)

    fuzz(st.one_of(*[st.tuples(st.just(i), mutated([data])) for i, data in enumerate(originals)]), check, batch=10)


def test_any_gguf_file_is_read_or_refused(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "model.gguf")
    data = path.read_bytes()
    size = data.rfind(b"token_embd") + 400
    head, rest = data[:size], data[size:]

    def check(data: bytes) -> None:
        path.write_bytes(data + rest)
        refused_or(lambda: read_model(path))
        refused_or(lambda: GgufModel.open(path))
        refused_or(lambda: to_ids(load_tokenizer(path).backend)(["Once upon a time"], True))

    fuzz(mutated([head], [b"\x08\0\0\0", b"\x09\0\0\0", b"GGUF\x03\0\0\0"]), check, batch=10)
