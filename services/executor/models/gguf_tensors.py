"""The tensors of a GGUF file, under the names and in the order of rows that Hugging Face's checkpoints have."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from torch import Tensor

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.gguf.config import EMBEDDING, OUTPUT, ROPE_FACTORS, read_config
from pagewire.shared.gguf.reader import GgufModel, StoredTensor, TensorType

CHUNK = 1 << 17
"""Numbers that are unpacked at a time: what numpy makes of them on the way stays in a core's cache."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of the file that PyTorch has, too."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", OUTPUT: "lm_head.weight"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = (".q_proj.", ".k_proj.")

Blocks = npt.NDArray[np.uint8]
"""[rows, bytes of a row], as they lie in the file."""


@contextmanager
def open_gguf(path: Path) -> Iterator["GgufTensors"]:
    """The tensors of a GGUF file and of its parts; the files are closed behind the block.

    Raises:
        ConfigurationError: a file is missing or broken, or its architecture is not supported.
    """
    model = GgufModel.open(path)
    config = read_config(model)
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context(file.open("rb")).fileno() for file in model.files}
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        head = config["head_dim"] if model.metadata["general.architecture"] == "llama" else None
        yield GgufTensors(model, files, head)


class GgufTensors:
    """A `TensorSource`. `blocks` gives the same tensors packed, as they lie in the file.

    Files of the llama architecture have the rows of each query and key head in the order of ggml's rotary embedding,
    which turns neighbours (2i, 2i + 1), where Hugging Face's turns (i, i + d/2).
    """

    def __init__(self, model: GgufModel, files: Mapping[Path, int], rotated_head: int | None) -> None:
        self._files, self._head = files, rotated_head
        self._stored = {_name(name): tensor for name, tensor in model.tensors.items() if name != ROPE_FACTORS}

    def names(self) -> Collection[str]:
        """See `TensorSource.names`."""
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._stored[name].shape

    def type(self, name: str) -> TensorType:
        """How a tensor is packed."""
        return self._stored[name].type

    def row_order(self, name: str) -> Tensor | None:
        """Of each row in the file [rows], which row of the tensor it is; None: they lie in order."""
        if self._head is None or not any(part in name for part in _ROTATED):
            return None
        return torch.arange(self._stored[name].shape[0]).view(-1, 2, self._head // 2).transpose(1, 2).flatten()

    def blocks(self, name: str, first: int, count: int) -> Blocks:
        """Rows [first, first + count) as they lie in the file, packed.

        Raises:
            ConfigurationError: the file cannot be read any more.
        """
        tensor = self._stored[name]
        found = np.empty((count, tensor.row_bytes), np.uint8)
        left, offset = found.reshape(-1).data, tensor.offset + first * tensor.row_bytes
        try:
            while left:
                if not (got := os.preadv(self._files[tensor.file], [left], offset)):
                    raise ConfigurationError(f"{tensor.file} has become shorter: fetch the model again")
                left, offset = left[got:], offset + got
        except OSError as error:
            raise ConfigurationError(f"cannot read {tensor.file}: {error.strerror}") from error
        return found

    def read(self, wanted: Mapping[str, Tensor]) -> None:
        """See `TensorSource.read`. Parts of tensors are unpacked side by side, one on each core."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            parts = [part for name, out in wanted.items() for part in self._parts(name, out)]
            for done in [threads.submit(part) for part in parts]:
                done.result()

    def _parts(self, name: str, out: Tensor) -> Iterator[Callable[[], None]]:
        """What fills `out`, cut into parts."""
        tensor, order = self._stored[name], self.row_order(name)
        if len(tensor.shape) == 1 and order is not None:
            yield lambda: _put(out, order, self._unpacked(tensor, name, 0, 1)[0])
            return
        rows = out.view(tensor.rows, tensor.shape[-1])
        step = max(1, CHUNK // tensor.shape[-1])
        for first in range(0, tensor.rows, step):
            count = min(step, tensor.rows - first)

            def fill(first: int = first, count: int = count) -> None:
                values = self._unpacked(tensor, name, first, count)
                if order is None:
                    rows[first : first + count].copy_(values)
                else:
                    _put(rows, order[first : first + count], values)

            yield fill

    def _unpacked(self, tensor: StoredTensor, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) as numbers, [count, columns]."""
        return dequantize(self.blocks(name, first, count), tensor.type)


def dequantize(blocks: Blocks, kind: TensorType) -> Tensor:
    """Packed rows [rows, bytes] as numbers [rows, columns]: float32, or the dtype of the file where it has a plain one.

    Overwrites nothing; the result may share the memory of `blocks`.
    """
    if kind.name in PLAIN:
        return torch.from_numpy(blocks).view(PLAIN[kind.name])
    unpack = getattr(quants, kind.name).dequantize_blocks
    return torch.from_numpy(unpack(blocks.reshape(-1, kind.size)).reshape(len(blocks), -1))


def _put(rows: Tensor, order: Tensor, values: Tensor) -> None:
    """Writes `values` to the rows that `order` names."""
    rows[order] = values.to(rows.dtype)


def _name(name: str) -> str:
    """The name in Hugging Face's checkpoints. Unknown names stay: who loads the model refuses them."""
    if (found := _LAYER.fullmatch(name)) and found[2] in _PARTS:
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    return _TOP.get(name, name)
