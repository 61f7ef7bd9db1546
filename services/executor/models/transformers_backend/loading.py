"""Builds and loads a decoder by `transformers`, behind the gate."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import structlog
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.gguf.tensors import open_gguf
from pagewire.services.executor.models.model import ModelSpec
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard, Slices, Units, take
from pagewire.services.executor.models.tensors import open_folder
from pagewire.services.executor.models.transformers_backend.gate import check_config, check_modules, max_length
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.services.executor.models.transformers_backend.part import TransformersCut, cut_class
from pagewire.services.executor.models.transformers_backend.probe import probe
from pagewire.services.executor.models.weights import random_weights
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import SUFFIX

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_log = structlog.get_logger()


class _Tensors(Protocol):
    """The tensors of a checkpoint."""

    def names(self) -> Collection[str]: ...
    def tensor(self, name: str) -> Tensor: ...


class _Stored:
    """A tensor that `transformers` reads when it takes all of its elements."""

    def __init__(self, stored: _Tensors, name: str, slices: Slices | None = None) -> None:
        """`slices` are the indices of the tensor that a rank needs; None: all."""
        self._stored, self._name, self._slices = stored, name, slices or {}

    def __getitem__(self, _all: EllipsisType) -> Tensor:
        part = take(self._stored.tensor(self._name), self._slices)
        # A view would keep the whole tensor in memory.
        return part.clone(memory_format=torch.contiguous_format) if self._slices else part


def load_decoder(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    quantization: dict[str, Any] | None = None,
    random: int | None = None,
    shard: Shard = ALONE,
    collectives: Collectives | None = None,
) -> TransformersLM:
    """Loads the model of `folder`, whose config.json is `config`, into CPU memory, ready for inference.

    Quantized weights are dequantized on the way, so that `transformers` sees an unquantized model. With `random`, a
    seed, it gets random weights, and those of the folder are not read. With `collectives`, it is the part of `shard`.

    Raises:
        ConfigurationError: the model cannot be served, or its weights do not match its configuration.
    """
    divisors = _divisors(config)
    parsed = parse_config(_without_divisors({key: config[key] for key in config if key != "quantization_config"}))
    name = type(parsed).model_type
    spec = examine(parsed)
    cut = None if collectives is None else _cut(parsed, shard)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    if random is not None:
        if cut is not None:
            raise ConfigurationError(f"load-format dummy cannot be cut for model_type {name}: leave it out")
        model = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
        model.load_state_dict(random_weights(model, dtype, random), strict=False)
        return finish(model)
    try:
        with _open(folder, parsed, quantization) as stored:
            model, info = (kind if cut is None else cut_class(kind, cut)).from_pretrained(
                None,
                config=parsed,
                dtype=dtype,
                state_dict=_state(stored, cut),
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"transformers cannot load {folder}: {_first_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, info[problem])):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigurationError(
                f"the checkpoint does not fit its config.json, {problem.replace('_', ' ')}: {shown}"
            )
    if divisors:
        _divide(model, divisors)
    _log.info("model_by_transformers", family=name, version=transformers.__version__, probed=spec is not None)
    if quantization is not None:
        _log.info("weights_dequantized", dtype=str(dtype))
    served = finish(model)
    if cut is not None and collectives is not None:
        cut.sum_over(served, collectives)
    return served


def _without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the model of a configuration on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    return model


def _cut(config: PretrainedConfig, shard: Shard) -> TransformersCut:
    """Returns how a rank's part is cut from the model.

    Raises:
        ConfigurationError: the family cannot be cut.
    """
    model = _without_memory(config)
    try:
        spec, attentions = _probed(model)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigurationError(
            f"model_type {config.model_type} cannot be cut for {shard.size} ranks, because it needs data to be built: "
            "set tensor-parallel-size to 1"
        ) from error
    cut = TransformersCut(model, spec.layers, attentions, shard, Units())
    cut.apply(model)
    try:
        part, _ = _probed(model)
    except Exception as error:  # code of any family, which raises what it likes
        reason = f"it does not compute with a part of its heads and features ({_first_line(error)})"
        raise cut.refusal(reason) from error
    if part.layers != cut.layers:
        raise cut.refusal("its attention does not follow the heads of its projections")
    return cut


def _state(stored: _Tensors, cut: TransformersCut | None) -> dict[str, _Stored]:
    """Returns the tensors of a checkpoint, or a rank's part of them, by name.

    Raises:
        ConfigurationError: the checkpoint does not have the tensors that are cut.
    """
    if cut is None:
        return {name: _Stored(stored, name) for name in stored.names()}
    if lacking := cut.slices.keys() - set(stored.names()):
        raise ConfigurationError(
            f"the checkpoint has no tensor {min(lacking)}, which several ranks need a part of: set "
            "tensor-parallel-size to 1"
        )
    names = [name for name in stored.names() if not cut.absent(name)]
    return {name: _Stored(stored, name, cut.slices.get(name, {})) for name in names}


@contextmanager
def _open(folder: Path, config: PretrainedConfig, quantization: dict[str, Any] | None) -> Iterator[_Tensors]:
    """Opens the tensors of a model folder or of a GGUF file.

    Raises:
        ConfigurationError: a file is broken, or a GGUF file has a tensor that the model has no use for.
    """
    if folder.suffix != SUFFIX:
        with open_folder(folder, quantization) as stored:
            yield stored
        return
    names = _without_memory(config).state_dict().keys()
    with open_gguf(folder, names) as tensors:
        if unknown := sorted(tensors.names() - names):
            raise ConfigurationError(f"{folder} has tensors that its architecture has no use for: {unknown[0]}")
        yield tensors


def _divisors(config: Mapping[str, Any]) -> list[float]:
    """Returns the divisors of the rotary frequencies that a GGUF file stores; empty if there are none."""
    rope = config.get("rope_parameters") or {}
    return list(rope.get("factors", ())) if rope.get("rope_type") == "factors" else []


def _without_divisors(config: dict[str, Any]) -> dict[str, Any]:
    if not _divisors(config):
        return config
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "factors"}
    return config | {"rope_parameters": rope | {"rope_type": "default"}}


def _divide(model: nn.Module, divisors: list[float]) -> None:
    """Divides the frequencies of all rotations."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            if len(buffer) != len(divisors):
                raise ConfigurationError(f"the file has {len(divisors)} rope factors for heads of {len(buffer)} pairs")
            buffer.div_(torch.tensor(divisors, device=buffer.device))


def parse_config(config: dict[str, Any]) -> PretrainedConfig:
    """Returns a config.json as `transformers` reads it.

    Raises:
        ConfigurationError: `transformers` does not know the architecture, or refuses a value.
    """
    kind = config.get("model_type")
    names = ", ".join(config.get("architectures") or ()) or "none"
    if kind not in transformers.CONFIG_MAPPING:
        if "auto_map" in config:
            raise ConfigurationError(
                f"architecture {names} brings code of its own, which is not run: use a model that transformers "
                f"{transformers.__version__} has code for"
            )
        raise ConfigurationError(
            f"architecture {names} is not supported: transformers {transformers.__version__} has no model_type {kind}"
        )
    try:
        parsed: PretrainedConfig = AutoConfig.for_model(**config)
    except Exception as error:  # checks of any family, which raise what they like
        raise ConfigurationError(f"config.json cannot be used: {_first_line(error)}") from error
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(f"architecture {names} is not supported: {kind} generates no text")
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)].__name__
    # Some families are published under the class name of their authors.
    if not any(name == known or name.endswith(_CAUSAL) for name in config.get("architectures") or ()):
        raise ConfigurationError(f"architecture {names} is not supported: {kind} generates text as {known} alone")
    return parsed


def examine(config: PretrainedConfig) -> ModelSpec | None:
    """Returns the spec of a model without its weights; None if that takes data.

    Raises:
        ConfigurationError: the model cannot be served.
    """
    try:
        check_config(config)
        model = _without_memory(config)
        check_modules(model)
        try:
            spec, _ = _probed(model)
        except (NotImplementedError, RuntimeError):
            return None
        return spec
    except ConfigurationError as error:
        raise ConfigurationError(f"model_type {config.model_type} is not supported: {error}") from error
    except Exception as error:  # code of any family, which raises what it likes
        raise ConfigurationError(
            f"model_type {config.model_type} is not supported: transformers cannot build it "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error


def finish(model: PreTrainedModel) -> TransformersLM:
    """Returns a model with its weights, ready for inference.

    Raises:
        ConfigurationError: the model cannot be served.
    """
    try:
        spec, attentions = _probed(model.eval().requires_grad_(requires_grad=False))
    except ConfigurationError as error:
        raise ConfigurationError(f"model_type {model.config.model_type} is not supported: {error}") from error
    return TransformersLM(model, spec, attentions)


def _probed(model: PreTrainedModel) -> tuple[ModelSpec, list[nn.Module]]:
    recorder, vocab_size = probe(model)
    layers: tuple[Attention, ...] = tuple(recorder.layers)
    return ModelSpec(vocab_size, layers, max_length(model.config)), recorder.modules


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
