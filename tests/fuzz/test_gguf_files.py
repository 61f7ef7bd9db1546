"""GGUF files that lie about themselves: they are read, or refused in one line, in little memory."""

import inspect
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from pagewire.services.executor.models.registry import load_model
from pagewire.services.tokenizer.encoder import to_ids
from pagewire.shared.models import model_folder
from pagewire.shared.models.gguf import config, family_fields, keys, rope
from pagewire.shared.models.gguf.architectures import ARCHITECTURES
from pagewire.shared.models.gguf.reader import TENSOR_TYPES, GgufModel, StoredTensor, Strings
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.test_model_files import refused_or
from tests.support.gguf_bytes import entry, header, tensor, text
from tests.support.gguf_files import from_checkpoint

MOST_BYTES = 1 << 24
"""Bytes that reading a header and its configuration may take: many times those of the file."""
HUGE = (2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
ALIGNMENT = 32


class Sample(NamedTuple):
    """The parts of a file before its first tensor."""

    entries: tuple[tuple[str, int, bytes], ...]
    """Key, type and value of each metadata entry."""
    tensors: tuple[tuple[str, tuple[int, ...], int, int], ...]
    """Name, shape in ggml's order, type and offset of each tensor."""

    def head(self, more: int = 0) -> bytes:
        """The file up to its first tensor; its counts are larger by `more` than what it holds."""
        body = b"".join(entry(*each) for each in self.entries) + b"".join(tensor(*each) for each in self.tensors)
        head = header(len(self.tensors) + more, len(self.entries) + more, body)
        return head + bytes(-len(head) % ALIGNMENT)


def sample_of(model: GgufModel, start: int) -> Sample:
    """A file taken apart, whose first tensor begins at byte `start`."""
    numbers = {kind: number for number, kind in TENSOR_TYPES.items()}
    return Sample(
        tuple((key, *_value(model, key)) for key in model.metadata),
        tuple(
            (stored.name, stored.shape[::-1], numbers[stored.type], stored.offset - start)
            for stored in model.tensors.values()
        ),
    )


def _value(model: GgufModel, key: str) -> tuple[int, bytes]:
    """Type and bytes of a metadata value."""
    match model.metadata[key]:
        case bool(value):
            return 7, struct.pack("<?", value)
        case int(value):
            return 4, struct.pack("<I", value)
        case float(value):
            return 6, struct.pack("<f", value)
        case str(value):
            return 8, text(value)
        case Strings(number):
            return 9, struct.pack("<IQ", 8, number) + b"".join(map(text, model.strings(key)))
        case value:
            kind = {"i": 5, "u": 4, "f": 6}[value.dtype.kind]
            return 9, struct.pack("<IQ", kind, len(value)) + value.tobytes()


numbers = st.one_of(st.integers(0, 70), st.sampled_from(HUGE))
values = st.one_of(
    st.tuples(st.just(10), numbers.map(lambda value: struct.pack("<Q", value))),
    st.tuples(st.just(11), st.sampled_from([-1, -(2**63), 2**40]).map(lambda value: struct.pack("<q", value))),
    st.tuples(st.just(6), st.floats(width=32).map(lambda value: struct.pack("<f", value))),
    st.tuples(st.just(7), st.sampled_from([b"\0", b"\1", b"\7"])),
    st.tuples(st.just(8), st.sampled_from(["", "llama", "yarn", "\n", "\ud7ff", "x" * 3000]).map(text)),
    st.tuples(st.integers(0, 14), st.binary(max_size=12)),
    st.tuples(st.just(9), st.builds(lambda kind, count: struct.pack("<IQ", kind, count), st.integers(0, 13), numbers)),
    st.tuples(st.just(9), st.lists(st.integers(0, 9)).map(lambda v: struct.pack(f"<IQ{len(v)}I", 4, len(v), *v))),
)
"""Type and bytes of a metadata value."""
shapes = st.lists(numbers, max_size=6).map(tuple)


@st.composite
def lies(draw: st.DrawFn, sample: Sample) -> tuple[bytes, int]:
    """The start of the sample's file in which a few things are not as they say, and the bytes that its end lacks."""
    entries, tensors, more = list(sample.entries), list(sample.tensors), 0
    for _ in range(draw(st.integers(0, 4))):
        key, place = draw(st.integers(0, len(entries) - 1)), draw(st.integers(0, len(tensors) - 1))
        name, shape, kind, offset = tensors[place]
        match draw(st.sampled_from(["value", "value", "key", "shape", "type", "offset", "name", "twice", "count"])):
            case "value":
                entries[key] = (entries[key][0], *draw(values))
            case "key":
                entries.append((draw(st.sampled_from(entries))[0], *draw(values)))
            case "shape":
                tensors[place] = name, draw(shapes), kind, offset
            case "type":
                tensors[place] = name, shape, draw(st.one_of(st.integers(0, 45), st.just(2**32 - 1))), offset
            case "offset":
                tensors[place] = name, shape, kind, draw(numbers)
            case "name":
                tensors[place] = draw(st.sampled_from(["", "\n", "x", tensors[0][0]])), shape, kind, offset
            case "twice":
                tensors.append(tensors[place])
            case _:
                more = draw(numbers) % (2**64 - 1 - len(entries) - len(tensors))
    head = Sample(tuple(entries), tuple(tensors)).head(more)
    return head[: draw(st.one_of(st.just(len(head)), st.integers(0, len(head))))], draw(st.integers(0, 3)) * 1000


def in_little_memory(read: Callable[[], object]) -> None:
    """Allows refusals of one line alone, and `MOST_BYTES`."""
    tracemalloc.start()
    try:
        refused_or(read)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_any_lie_of_a_file_is_harmless_or_refused(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "model.gguf", "Q8_0")
    model, data = GgufModel.open(path), path.read_bytes()
    start = min(stored.offset for stored in model.tensors.values())
    sample = sample_of(model, start)
    assert sample.head() == data[:start]

    def check(lie: tuple[bytes, int]) -> None:
        head, missing = lie
        path.write_bytes(head + data[start : len(data) - missing])
        in_little_memory(lambda: GgufModel.open(path))
        in_little_memory(lambda: model_folder.read_config(path))
        in_little_memory(lambda: model_folder.eos_ids(path))
        in_little_memory(lambda: model_folder.read_generation_config(path))
        refused_or(lambda: load_model(path, model_folder.read_config(path), "auto"))
        in_little_memory(lambda: to_ids(load_tokenizer(path).backend)(["Once upon a time"], True))

    fuzz(lies(sample), check, batch=10)


FIELDS = sorted(
    {
        match
        for module in (config, family_fields, keys, rope)
        for match in re.findall(r'"([a-z_]+(?:\.[a-z_]+)*)"', inspect.getsource(module))
    }
)
"""Names that the readers of configurations mention; the keys of files are among them."""
NUMBERS: dict[str, Any] = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "feed_forward_length": 48,
    "expert_count": 4,
    "expert_used_count": 2,
    "rope.dimension_count": 8,
    "attention.sliding_window": 16,
    "activation_sparsity_scale": np.zeros(4, np.float32),
}
stored = st.one_of(
    numbers,
    st.sampled_from([-1, -(2**63), 0.0, 1e-30, 3.4e38, float("inf"), float("nan"), True, False, "yarn", "linear", ""]),
    st.lists(st.integers(0, 9), max_size=9).map(lambda value: np.array(value, np.uint32)),
    st.lists(st.floats(width=32), max_size=9).map(lambda value: np.array(value, np.float32)),
    st.just(Strings(3, 0, 0)),
)


def test_any_metadata_of_any_architecture_is_read_or_refused(tmp_path: Path) -> None:
    path, kind = tmp_path / "model.gguf", TENSOR_TYPES[0]
    path.write_bytes(bytes(1 << 12))
    shapes = {
        "token_embd.weight": (64, 32),
        "per_layer_token_embd.weight": (64, 32),
        "rope_freqs.weight": (4,),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.ffn_down.weight": (32, 48),
        "blk.0.ffn_up_exps.weight": (4, 48, 32),
    }
    tensors = {name: StoredTensor(name, shape, kind, path, 0) for name, shape in shapes.items()}

    def check(choice: tuple[str, dict[str, Any]]) -> None:
        name, changes = choice
        metadata = {f"{name}.{key}": value for key, value in (NUMBERS | changes).items()}
        model = GgufModel(path, (path,), {"general.architecture": name} | metadata, tensors)
        in_little_memory(lambda: config.read_config(model))

    known = [
        *((name, {"block_count": 2**62}) for name in ("llama", "gemma3n", "exaone-moe")),
        *((name, {"leading_dense_block_count": 2**62}) for name in ARCHITECTURES),
        ("gemma3", {"attention.sliding_window_pattern": 0}),
    ]
    changes = st.dictionaries(st.sampled_from(FIELDS), stored, max_size=4)
    fuzz(st.tuples(st.sampled_from(sorted(ARCHITECTURES)), changes), check, known)
