"""A GGUF file that is broken, hostile or not for us is refused with one line, and costs no memory."""

import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import GgufModel, model_name
from tests.support.gguf_bytes import entry, header, tensor, text
from tests.support.gguf_files import from_checkpoint

SMALL = 1 << 20
"""Bytes that reading a header of a tiny model may take."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return from_checkpoint("llama", tmp_path / "model.gguf", "Q8_0")


def refusal(path: Path) -> str:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError) as caught:
            GgufModel.open(path)
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_metadata_and_tensors_are_found(file: Path) -> None:
    model = GgufModel.open(file)
    assert model.metadata["general.architecture"] == "llama"
    assert model.metadata["llama.block_count"] == 2
    assert model.strings("tokenizer.ggml.tokens")[0] == "<|end|>"
    assert model.strings("tokenizer.ggml.nothing") == []
    assert model.tensors["blk.1.ffn_down.weight"].shape == (64, 96)
    assert model.tensors["blk.1.ffn_down.weight"].type.name == "Q8_0"
    assert model.files == (file,)


@pytest.mark.parametrize("left", [4, 7, 23, 24, 60, 1000, 5000])
def test_a_truncated_header_is_refused(file: Path, left: int) -> None:
    file.write_bytes(file.read_bytes()[:left])
    assert "truncated" in refusal(file)


@pytest.mark.parametrize("missing", [1, 100, 20_000])
def test_truncated_tensors_are_refused(file: Path, missing: int) -> None:
    data = file.read_bytes()
    end = max(tensor.offset + tensor.rows * tensor.row_bytes for tensor in GgufModel.open(file).tensors.values())
    file.write_bytes(data[: end - missing])
    assert "is truncated: tensor" in refusal(file)


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGML" + bytes(60), b"PK\3\4" + bytes(60), bytes(64)])
def test_a_file_of_another_format_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert "is not a GGUF file" in refusal(path)


@pytest.mark.parametrize(("version", "word"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_an_unknown_version_is_refused(tmp_path: Path, version: int, word: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(version=version, body=bytes(64)))
    assert word in refusal(path)


HUGE = 1 << 62
BROKEN: dict[str, tuple[bytes, str]] = {
    "tensors": (header(tensors=HUGE), "names 4611686018427387904 tensors"),
    "entries": (header(entries=HUGE), "metadata entries"),
    "more tensors than fit": (header(tensors=100, body=bytes(1000)), "100 tensors"),
    "a key": (header(entries=1, body=struct.pack("<Q", HUGE) + bytes(64)), "within its header"),
    "a string": (header(entries=1, body=entry("k", 8, struct.pack("<Q", HUGE) + bytes(64))), "within its header"),
    "a list": (header(entries=1, body=entry("k", 9, struct.pack("<IQ", 4, HUGE) + bytes(64))), "numbers in a list"),
    "a list of strings": (header(entries=1, body=entry("k", 9, struct.pack("<IQ", 8, HUGE))), "strings in a list"),
    "a list of lists": (header(entries=1, body=entry("k", 9, struct.pack("<IQ", 9, 3) + bytes(64))), "unknown type 9"),
    "a type of value": (header(entries=1, body=entry("k", 77, bytes(64))), "unknown type 77"),
    "a key twice": (header(entries=2, body=2 * entry("k", 4, bytes(4))), "two entries 'k'"),
    "a key that is no text": (header(entries=1, body=text(b"\xff\xff") + bytes(64)), "not UTF-8"),
    "dimensions": (header(tensors=1, body=text("t") + struct.pack("<I", 1 << 30) + bytes(64)), "dimensions"),
    "no dimensions": (header(tensors=1, body=text("t") + struct.pack("<I", 0) + bytes(64)), "0 dimensions"),
    "a shape": (header(tensors=1, body=tensor("t", (1 << 40, 1 << 40), 0)), "is truncated: tensor 't'"),
    "an empty shape": (header(tensors=1, body=tensor("t", (0, 4), 0)), "cannot store"),
    "half a block": (header(tensors=1, body=tensor("t", (33, 4), 8)), "Q8_0 cannot store"),
    "an offset": (header(tensors=1, body=tensor("t", (1,), 0, HUGE)), "is truncated: tensor 't'"),
    "a type of tensor": (header(tensors=1, body=tensor("t", (32,), 36)), "ggml's type 36"),
    "a tensor twice": (header(tensors=2, body=2 * tensor("t", (1,), 0) + bytes(64)), "two tensors"),
    "an alignment": (header(entries=1, body=entry("general.alignment", 4, bytes(4))), "alignment of 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_impossible_counts_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    data, word = BROKEN[name]
    path.write_bytes(data)
    assert word in refusal(path)


def test_a_huge_file_with_huge_counts_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(tensors=1 << 40, entries=1))
    os.truncate(path, 1 << 43)
    assert "tensors" in refusal(path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "there is no file" in refusal(tmp_path / "pipe.gguf")
    assert "there is no file" in refusal(tmp_path / "nothing.gguf")
    assert "there is no file" in refusal(tmp_path)


def split(folder: Path) -> list[Path]:
    from_checkpoint("llama", folder / "model.gguf", split=8)
    return sorted(folder.glob("*.gguf"))


def test_parts_belong_together(tmp_path: Path) -> None:
    parts = split(tmp_path)
    model = GgufModel.open(parts[0])
    assert list(model.files) == parts
    assert model_name(parts[0]) == "model"
    assert {tensor.file for tensor in model.tensors.values()} == set(parts)


def test_parts_of_a_linked_model_lie_beside_the_link(tmp_path: Path) -> None:
    stored, linked = tmp_path / "blobs", tmp_path / "snapshot"
    stored.mkdir()
    linked.mkdir()
    for number, part in enumerate(split(tmp_path)):
        (linked / part.name).symlink_to(part.rename(stored / f"blob{number}"))
    assert len(GgufModel.open(min(linked.glob("*.gguf"))).files) > 2


def drop(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[0]


def swap(parts: list[Path]) -> Path:
    shutil.copy(parts[2], parts[1])
    return parts[0]


def second(parts: list[Path]) -> Path:
    return parts[1]


def renamed(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("model.gguf"))


def escaping(parts: list[Path]) -> Path:
    """A name that would lead out of the folder if it were pasted together."""
    (parts[0].parent / "..%2f").mkdir()
    return parts[0].rename(parts[0].parent / "..%2f" / "..-00001-of-99999.gguf")


def pipe(parts: list[Path]) -> Path:
    parts[1].unlink()
    os.mkfifo(parts[1])
    return parts[0]


def miscounted(parts: list[Path]) -> Path:
    data = parts[0].read_bytes()
    key = b"split.tensors.count" + struct.pack("<I", 5)
    place = data.index(key) + len(key)
    parts[0].write_bytes(data[:place] + struct.pack("<i", 7) + data[place + 4 :])
    return parts[0]


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (drop, "there is no file"),
        (swap, "is not the part that its name states"),
        (second, "not the first of its"),
        (renamed, "does not end in -00001-of-0000"),
        (escaping, "does not end in -00001-of-0000"),
        (pipe, "there is no file"),
        (miscounted, "of 7 tensors"),
    ],
)
def test_parts_of_different_models_are_refused(tmp_path: Path, harm: Callable[[list[Path]], Path], word: str) -> None:
    assert word in refusal(harm(split(tmp_path)))
