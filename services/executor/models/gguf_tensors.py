"""The tensors of a GGUF file, with the names and the row order of Hugging Face's checkpoints."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch
from gguf import quants
from torch import Tensor

from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.config import EMBEDDING, OUTPUT, ROPE_FACTORS, read_config
from pagewire.shared.models.gguf.reader import GgufModel, StoredTensor, TensorType
from pagewire.shared.progress import shown

CHUNK = 1 << 17
"""Numbers that are dequantized at a time: numpy's temporary arrays then fit into a core's cache."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGUF types that PyTorch has as dtypes."""

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

_log = structlog.get_logger()

Blocks = npt.NDArray[np.uint8]
"""[rows, bytes per row], packed as in the file."""


@contextmanager
def open_gguf(path: Path) -> Iterator["GgufTensors"]:
    """Opens a GGUF file and its parts as a context manager, which closes the files.

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
    """The tensors of a GGUF model, as a `TensorSource`. `blocks` returns tensors packed as in the file.

    In files of the llama architecture, the rows of each query and key head are in the order of ggml's rotary embedding,
    which rotates pairs (2i, 2i + 1), while Hugging Face rotates pairs (i, i + d/2).
    """

    def __init__(self, model: GgufModel, files: Mapping[Path, int], rotated_head: int | None) -> None:
        self._files, self._head = files, rotated_head
        self._stored = {hub_name(name): tensor for name, tensor in model.tensors.items() if name != ROPE_FACTORS}

    def names(self) -> Collection[str]:
        """Returns the names of all tensors, as Hugging Face has them."""
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._stored[name].shape

    def type(self, name: str) -> TensorType:
        """Returns the packed type of a tensor."""
        return self._stored[name].type

    def row_order(self, name: str) -> Tensor | None:
        """Returns, for each row in the file [rows], its row in the tensor; None if the order is the same."""
        if self._head is None or not is_rotated(name):
            return None
        return rotated_rows(self._stored[name].shape[0], self._head)

    def blocks(self, name: str, first: int, count: int) -> Blocks:
        """Returns rows [first, first + count), packed as in the file.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        tensor = self._stored[name]
        blocks = np.empty((count, tensor.row_bytes), np.uint8)
        unread, offset = blocks.reshape(-1).data, tensor.offset + first * tensor.row_bytes
        try:
            while unread:
                if not (count_read := os.preadv(self._files[tensor.file], [unread], offset)):
                    raise ConfigurationError(f"{tensor.file} has become shorter: fetch the model again")
                unread, offset = unread[count_read:], offset + count_read
        except OSError as error:
            raise ConfigurationError(f"cannot read {tensor.file}: {error.strerror}") from error
        return blocks

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fills each of `targets`. Parts of tensors are dequantized in parallel on all cores."""
        kinds = Counter(kind for name in targets if (kind := self.type(name).name) not in PLAIN)
        if kinds:
            _log.info("weights_dequantized", matrices=dict(kinds))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            parts = [part for name, out in targets.items() for part in self._parts(name, out)]
            for done in shown([threads.submit(part) for part in parts], "loading weights"):
                done.result()

    def integers(self, name: str) -> IntegerWeights | None:
        """Returns a matrix as integers; None if it is stored otherwise."""
        tensor, order = self._stored[name], self.row_order(name)
        if len(tensor.shape) != 2 or tensor.type.name in PLAIN:
            return None
        weights = unpack_integers(self.blocks(name, 0, tensor.rows), tensor.type)
        return weights if order is None or weights is None else weights.rows(order.argsort())

    def eight_bits(self, name: str) -> Scaled | None:
        """Returns None: no type of this format says how activations are stored."""
        return None

    def _parts(self, name: str, out: Tensor) -> Iterator[Callable[[], None]]:
        """Yields functions that each fill a part of `out`."""
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
        """Returns rows [first, first + count) as numbers [count, columns]."""
        return dequantize(self.blocks(name, first, count), tensor.type)


def dequantize(blocks: Blocks, kind: TensorType) -> Tensor:
    """Returns packed rows [rows, bytes] as numbers [rows, columns], in float32 or the file's own unquantized dtype.

    The result may share the memory of `blocks`.
    """
    if kind.name in PLAIN:
        return torch.from_numpy(blocks).view(PLAIN[kind.name])
    unpack = getattr(quants, kind.name).dequantize_blocks
    return torch.from_numpy(unpack(blocks.reshape(-1, kind.size)).reshape(len(blocks), -1))


def _put(rows: Tensor, order: Tensor, values: Tensor) -> None:
    """Writes `values` to the rows in `order`."""
    rows[order] = values.to(rows.dtype)


def is_rotated(name: str) -> bool:
    """Returns whether files of the llama architecture have the rows of a tensor in ggml's order."""
    return any(part in name for part in _ROTATED)


def rotated_rows(rows: int, head: int) -> Tensor:
    """Returns, for each row [rows] in ggml's order, its row in Hugging Face's; `head` rows belong to a head."""
    return torch.arange(rows).view(-1, 2, head // 2).transpose(1, 2).flatten()


def hub_name(name: str) -> str:
    """Returns a tensor's name in Hugging Face's checkpoints. Unknown names stay: `load_weights` refuses them."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return _TOP.get(name, name)
