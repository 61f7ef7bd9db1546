"""The formats of quantized checkpoints, by the `quantization_config` of config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagewire.services.executor.models.quantized import awq, compressed_tensors, fp8, gptq, mxfp4, nvfp4
from pagewire.services.executor.models.quantized.weight import QuantizedWeight, StoredTensors
from pagewire.shared.errors import ConfigurationError

Format = Callable[[dict[str, Any], StoredTensors], dict[str, QuantizedWeight]]
"""Returns the quantized weights of a checkpoint by their names in the unquantized one, before any is read."""

FORMATS: Mapping[str, Format] = {
    "awq": awq.weights,
    "compressed-tensors": compressed_tensors.weights,
    "fbgemm_fp8": fp8.weights,
    "fp8": fp8.weights,
    "gptq": gptq.weights,
    "modelopt": nvfp4.weights,
    "mxfp4": mxfp4.weights,
}
"""Maps a `quant_method` to its format."""
MODELOPT_FILE = "hf_quant_config.json"
"""File of ModelOpt's settings, before ModelOpt wrote them to config.json."""
BITSANDBYTES = "bitsandbytes"


def read_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the `quantization_config` of a model; None if its weights are not quantized.

    Raises:
        ConfigurationError: ModelOpt's file is malformed.
    """
    entry = config.get("quantization_config")
    if entry is not None or not (folder / MODELOPT_FILE).is_file():
        return entry
    try:
        settings = msgspec.json.decode((folder / MODELOPT_FILE).read_bytes(), type=dict[str, Any])["quantization"]
        return dict(settings) | {"quant_method": "modelopt"}
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder / MODELOPT_FILE} cannot be used: fetch the model again") from error


def find_format(quantization: dict[str, Any]) -> Format:
    """Returns the format of a `quantization_config`.

    Raises:
        ConfigurationError: there is none of its `quant_method`.
    """
    method = str(quantization.get("quant_method"))
    if method == BITSANDBYTES or any(quantization.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        raise ConfigurationError(
            f"weights quantized by {BITSANDBYTES} are not supported: use the unquantized model, or one quantized by "
            f"{', '.join(FORMATS)}"
        )
    if method not in FORMATS:
        raise ConfigurationError(
            f"quant_method {method} of config.json is not supported, only {', '.join(FORMATS)}: use the unquantized "
            "model, or one quantized by these"
        )
    return FORMATS[method]
