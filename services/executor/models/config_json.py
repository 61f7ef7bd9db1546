"""config.json as typed, checked structs."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch

from pagewire.shared.errors import ConfigurationError

Positive = Annotated[int, msgspec.Meta(ge=1)]
DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

C = TypeVar("C", bound=msgspec.Struct)


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all model families have. Unknown keys are ignored."""

    architectures: tuple[str, ...] = ()
    """Class names of transformers; the first known one is used."""
    model_type: str | None = None
    """The family's name in transformers."""
    dtype: str | None = None
    """Dtype of the weights, as transformers 5 names it."""
    torch_dtype: str | None = None
    """Dtype of the weights, as transformers 4 names it."""
    quantization_config: dict[str, Any] | None = None
    """Description of the quantization; None if the weights are not quantized."""


def parse(kind: type[C], config: dict[str, Any]) -> C:
    """Returns `config` as a struct of type `kind`.

    Raises:
        ConfigurationError: a value is missing, of the wrong type or out of range.
    """
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"config.json cannot be used: {error}") from error


def weights_dtype(setting: DtypeSetting, config: Common) -> torch.dtype:
    """Returns the dtype to compute in: as set, else the dtype of the saved weights, else float32.

    Raises:
        ConfigurationError: the dtype of the saved weights is not in `DTYPES`.
    """
    name = setting if setting != "auto" else config.dtype or config.torch_dtype or "float32"
    if name not in DTYPES:
        raise ConfigurationError(f"config.json has dtype {name}: set dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]
