"""The memory that models need at least, and what each of several models may take."""

from collections.abc import Iterator, Mapping, Set
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import SUFFIX, GgufModel
from pagewire.shared.models.model_folder import max_model_len, read_config, weight_files
from pagewire.shared.models.native_families import is_native
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model

POOL_SHARE = 0.5
"""Share of the free memory that the KV pool takes on a CPU: the rest is for activations and for other programs."""
SERVICES = 600 << 20
"""Bytes that the processes of a model's services hold beside weights and KV cache."""
GPU_RUNTIME = 2 << 30
"""Bytes of a GPU that the captured graphs, the activations and the runtime of one model take."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def memory_need(settings: Settings, path: Path) -> int:
    """Returns the bytes of the device's memory that a model at `path` needs at least, with all its replicas on a CPU,
    and of the first of several GPUs.

    These are its weights as they are stored, the KV cache that is set or else that of one sequence, and the runtime;
    with a model that drafts, which one rank has, the weights and the KV cache of both. What each of several ranks has
    counts once per rank, but for the weights of KV heads that ranks share, which are a small part.

    Raises:
        ConfigurationError: the configuration or a file of the model cannot be read.
    """
    if settings.device.startswith("sim:"):
        return SERVICES
    cuda = settings.device == "cuda"
    ranks = settings.tensor_parallel_size
    stored, pool = _stored(settings, path), _pool(settings, path, share=1.0 if cuda else POOL_SHARE)
    if ranks > 1 and stored:
        stored += (ranks - 1) * _whole_bytes(path)
    drafting = 0
    if (draft := draft_model(settings)) is not None:
        drafting = _stored(draft, Path(draft.model))
        if settings.kv_cache_memory is None:  # which is for both pools; they have as many positions
            more = position_bytes(read_config(Path(draft.model)), draft)
            drafting += pool * more // max(position_bytes(read_config(path), settings, ranks), 1)
    if cuda:
        return GPU_RUNTIME + (stored + pool) // ranks + drafting
    return SERVICES + (stored + pool + drafting) * settings.data_parallel_size


def _stored(settings: Settings, path: Path) -> int:
    """Returns the bytes of the weights."""
    return sum(file.stat().st_size for file in weight_files(path)) if settings.load_format == "auto" else 0


def _whole_bytes(path: Path) -> int:
    """Returns the bytes of the embedding and of the output matrix, where every rank has them whole.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    config = read_config(path)
    if is_native(config):
        return 0
    return sum(size for shape, size in _tensors(path) if len(shape) == 2 and shape[0] == config.get("vocab_size"))


def _tensors(path: Path) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the shape of every stored tensor, and its bytes; 0 where it is quantized in safetensors."""
    if path.suffix == SUFFIX:
        for tensor in GgufModel.open(path).tensors.values():
            yield tensor.shape, tensor.rows * tensor.row_bytes
        return
    for file in weight_files(path):
        try:
            with safe_open(file, "numpy") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                    part = stored.get_slice(name)
                    shape = tuple(part.get_shape())
                    yield shape, prod(shape) * _STORED_BYTES.get(part.get_dtype(), 0)
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"cannot read {file} ({error}): fetch the model again") from error


def _pool(settings: Settings, path: Path, share: float) -> int:
    """Returns the bytes of the KV pool that is set, or that must be free so that a `share` of them holds a sequence."""
    if settings.kv_cache_memory is not None:
        return settings.kv_cache_memory
    config = read_config(path)
    position = position_bytes(config, settings, settings.tensor_parallel_size)
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks * settings.block_size * position
    length = max_model_len(settings, config)
    window = config.get("sliding_window")
    return int(min(length, window if isinstance(window, int) else length) * position / share)


def position_bytes(config: Mapping[str, Any], settings: Settings, ranks: int = 1) -> int:
    """Returns the bytes of one position in the KV cache of the model with this config.json, on all ranks together; 0 if
    it does not say. Each rank has as many heads as the one with the most.

    >>> shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "bfloat16"}
    >>> position_bytes(shape, Settings())
    512
    >>> position_bytes(shape, Settings(), ranks=3)
    768
    """
    layers, heads, hidden = (
        next((config[name] for name in names if isinstance(config.get(name), int)), 0)
        for names in (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
    )
    head_dim = config.get("head_dim") or hidden // max(heads, 1)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    element = _BYTES.get(stored if settings.dtype == "auto" else settings.dtype, 2)
    if settings.kv_cache_dtype != "auto":
        element = 1
    kv_heads = ranks * -(-(config.get("num_key_value_heads") or heads) // ranks)
    return 2 * layers * kv_heads * int(head_dim) * element


def shares(needs: Mapping[str, int], free: int, fixed: Set[str] = frozenset()) -> dict[str, int]:
    """Returns the bytes that each model may take: its need, and an equal part of what all needs leave free.

    >>> shares({"a": 10, "b": 30}, free=100)
    {'a': 40, 'b': 60}

    Args:
        needs: bytes that each model needs at least, by its name.
        free: bytes that are free on the device.
        fixed: names of the models that get no more than their need.

    Raises:
        ConfigurationError: the needs exceed what is free.
    """
    total = sum(needs.values())
    if total > free:
        each = ", ".join(f"{name} at least {need / 1e9:.2f} GB" for name, need in needs.items())
        raise ConfigurationError(
            f"the models do not fit: {each}, together {total / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free: serve "
            "fewer or smaller ones, or lower max-model-len or kv-cache-memory"
        )
    part = (free - total) // max(len(needs.keys() - fixed), 1)
    return {name: need + (0 if name in fixed else part) for name, need in needs.items()}
