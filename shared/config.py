"""Settings: one struct, filled from flags, then environment, then a TOML file, then defaults."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pagewire.shared.errors import ConfigurationError

ENVIRONMENT_PREFIX = "PAGEWIRE_"
STEP_TOKENS = 512
"""Tokens per step where nothing is set, to begin with."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"):
    """Every setting of every service. Flag `--max-num-seqs`, variable `PAGEWIRE_MAX_NUM_SEQS`, key `max-num-seqs`."""

    model: str = ""
    """Folder, .gguf file, hub id or short name; empty: smollm2-135m-instruct, or bundled where that cannot be had."""
    served_model_name: str = ""
    """Name in requests; empty: the folder's name."""
    host: str = "127.0.0.1"
    """Where HTTP listens."""
    port: Port = 8000
    """HTTP port; 0: a free one."""
    device: str = "cpu"
    """cpu, cuda, or sim:<gpu> (a100-80, h100, h200, l40s, zero), which only takes time."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; auto: what the model's config says, but float32 on a CPU that has neither bf16 products nor
    compiled kernels. A CPU with bf16 products rounds what it multiplies with them to bf16; all else is float32 there.
    """
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values in the cache; auto: `dtype`; fp8 (e4m3, without scales): only on cuda."""
    batch_invariant: bool = False
    """Results that do not depend, to the bit, on what else runs; slower, and only on cuda."""
    chat_template: str = ""
    """File with a chat template, or the text of one; empty: the model's own."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Sampling where a request names none; auto: by the model's generation_config.json; vllm: the neutral defaults."""
    max_model_len: int | None = None
    """Context in tokens; None: the model's own."""
    max_num_seqs: Positive = 64
    """Slots: sequences that run at once."""
    max_num_batched_tokens: Positive | None = None
    """Tokens per step; None: 512, and on a CPU as many as take 100 ms, up to 4096: see `Budget`."""
    block_size: Positive = 16
    """KV positions per block."""
    kv_cache_memory: int | None = None
    """Bytes of the KV pool; None: a share of the free memory."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool, instead of a size in bytes."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of the device's memory that may be used."""
    tensor_parallel_size: Positive = 1
    """GPUs that share one model; more than one only where they are simulated."""
    data_parallel_size: Positive = 1
    """Replicas of the model: pairs of a scheduler and an executor that share one queue."""
    seed: int = 0
    """Of the weights of a device without weights and of drawn request seeds when not 0."""
    api_key: str = ""
    """What clients must bring; empty: nothing."""
    lease_window: Positive = 8
    """Steps that the executor may run ahead of the scheduler's knowledge."""
    itl_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Time of a step, in milliseconds, that the tokens per step follow; None: on a CPU, 100."""
    nats_url: str = ""
    """Broker; empty: an embedded one."""
    nats_port: Port = 4222
    """Of the embedded broker; a free one when taken or 0."""
    nats_user: str = ""
    """Credentials of the services."""
    nats_password: str = ""
    """Credentials of the services."""
    log_format: Literal["console", "json"] | None = None
    """One line per event, for people or for machines; None: for people at a terminal, else for machines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is logged."""
    trace_dir: str = ""
    """Folder for spans; empty: none are written."""
    prefix_cache: bool = True
    """Share the KV blocks of equal prefixes."""


FIELDS = {field.encode_name: field for field in msgspec.structs.fields(Settings)}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper().replace("-", "_")


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config: Path | None = None) -> Settings:
    """The settings in force. `flags` has kebab-case names, as strings or values.

    Raises:
        ConfigurationError: an unknown name, or a value of the wrong kind or out of range.
    """
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values.update(tomllib.loads(config.read_text()))
        except OSError as error:
            raise ConfigurationError(f"cannot read the configuration {config}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{config} is not TOML: {error}") from error
    values.update({name: environ[variable(name)] for name in FIELDS if variable(name) in environ})
    values.update(flags)
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"setting refused: {error}") from error


def to_environment(settings: Settings) -> dict[str, str]:
    """The environment that makes `load` return the same settings in another process."""
    values = msgspec.to_builtins(settings)
    return {variable(name): str(value) for name, value in values.items() if value is not None}
