"""The settings: one struct, filled from flags, environment variables, a file and defaults, in this order."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import config_file, sizes
from pagewire.shared.settings.environment import settings_in, variable
from pagewire.shared.settings.spelling import did_you_mean

DEFAULT_NATS_PORT = 4222
MAX_STORE = 1 << 30
"""Default bytes of JetStream's storage."""
STEP_TOKENS = 512
"""Initial number of tokens per step without `max_num_batched_tokens`."""
SIZES_PER_OCTAVE = 4
"""Sizes of steps that a GPU has graphs for, from one power of two to the next. A step between two of them takes as long
as the larger one."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Duration = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$")]
"""A number with its unit: 500ms, 10s, 2m, 1h."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"):
    """Every setting of every service. Flag `--max-num-seqs`, variable `PAGEWIRE_MAX_NUM_SEQS`, key `max-num-seqs`."""

    model: str = ""
    """Folder, .gguf file, hub id or short name; empty: smollm2-135m-instruct, or bundled where that cannot be had."""
    served_model_name: str = ""
    """Names of the model in requests, several separated by commas or spaces; by default the folder's name or hub id."""
    host: str = "127.0.0.1"
    """Address that the HTTP server listens on."""
    port: Port = 8000
    """Port of the HTTP server; 0: any free port."""
    device: str = "auto"
    """auto (cuda where a supported GPU is, else cpu), cpu, cuda, or sim:<gpu> (a100-80, h100, h200, l40s, zero), which
    simulates step times without computing."""
    revision: str = ""
    """Branch, tag or commit of a model that a hub id names; by default the newest."""
    tokenizer: str = ""
    """Folder, .gguf file, hub id or short name of a model whose tokenizer and chat template are used instead."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights instead of those in the files, of which only config.json and the tokenizer are read."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; auto: the model's own, but float32 on a CPU that has neither bf16 products nor
    compiled kernels. A CPU with bf16 products rounds their operands to bf16 and computes all else in float32.
    """
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Quantized weights; auto: kept as they are stored, on a CPU unless `dtype` is set; none: all become `dtype`;
    int8, int4 (on a CPU): the others are rounded too, per 32 inputs, with int4 those of the vocabulary to 6 bits.
    """
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Data type of the KV cache; auto: `dtype`; fp8 (e4m3, without scales): only on cuda; int8 (with a scale per token
    and KV head): only on a CPU, with its compiled kernels."""
    attention_backend: Literal["triton", "flashinfer", "TRITON_ATTN", "FLASHINFER"] = "triton"
    """Backend of attention on cuda: triton, with kernels of this project, or flashinfer, where it is installed;
    TRITON_ATTN and FLASHINFER are vLLM's names of the two."""
    batch_invariant: bool = False
    """Make results bitwise independent of the other sequences in a batch; slower, and only on cuda."""
    chat_template: str = ""
    """File with a chat template, or the text of one; by default the model's own."""
    enable_auto_tool_choice: bool = True
    """Let the model choose whether it calls the tools of a request."""
    tool_call_parser: Literal[
        "auto",
        "none",
        "glm45",
        "hermes",
        "kimi_k2",
        "llama3_json",
        "llama4_json",
        "mistral",
        "openai",
        "pythonic",
        "llama4_pythonic",
        "qwen3_coder",
        "qwen3_xml",
    ] = "auto"
    """How the model writes tool calls; auto: as its chat template shows, or as the system message says where the
    template shows no tools; none: they stay text."""
    reasoning_parser: Literal[
        "auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "mistral", "openai_gptoss", "qwen3"
    ] = "auto"
    """How the model writes reasoning; auto: as the tags of its chat template show, none: it stays text."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Sampling parameters that a request leaves out; auto: the model's generation_config; vllm: vLLM's defaults."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    """Meaning of `logprobs`: log-probabilities or logits, of the model's own distribution (raw), or after penalties,
    biases, temperature and filters (processed).
    """
    max_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=1024)] = 20
    """Most `logprobs` and `prompt_logprobs` that a request may ask for; -1: as many as there are tokens."""
    max_model_len: int | None = None
    """Context length in tokens, such as 4096, 4k or auto; by default the model's own."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """Maximum number of sequences that run at once, up to 65536; by default 64, or 256 on cuda and a simulated GPU, and
    1024 for the class `LLM` on a GPU of 70 GB and more; never more than there are KV blocks."""
    max_num_batched_tokens: Positive | None = None
    """Tokens per step; by default 8192 on cuda and a simulated GPU, 16384 for the class `LLM` there, else 512, and on a
    CPU as many as fit into the target step time, up to 4096."""
    block_size: Positive = 16
    """KV positions per block."""
    kv_cache_memory: Positive | None = None
    """Bytes of the KV cache, such as 4GiB; by default a share of the free memory."""
    num_kv_blocks: Annotated[int, msgspec.Meta(le=2**24)] | None = None
    """Blocks of the KV cache, instead of a size in bytes. Models with sliding windows take several per block of tokens,
    and give back those that the windows have left behind."""
    model_memory: Positive | None = None
    """Bytes that the model may take on its device, weights and KV cache together, such as 4GiB; by default all that is
    free, and of several models each gets its need and an equal part of the rest."""
    idle_unload: Duration | None = None
    """Unload the model after so long without a request, such as 10m, until the next one; by default never. Only for
    models of `pagewire serve`."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of the device's memory that may be used."""
    tensor_parallel_size: Positive = 1
    """Ranks that share one model, processes with a part of the weights each: on cuda each has a GPU of its own, and
    models that `transformers` computes are refused."""
    enable_expert_parallel: bool = False
    """Give each rank whole experts of a mixture instead of a part of every expert."""
    enable_lora: bool = False
    """Serve adapters (LoRA) beside the model."""
    lora_modules: str = ""
    """Adapters to load at the start, as name=path or as objects in JSON, several separated by commas."""
    max_loras: Positive = 1
    """Most adapters whose sequences run in one step."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=512)] = 16
    """Highest rank of an adapter."""
    max_cpu_loras: Positive | None = None
    """Adapters that stay in memory, the last used ones, beside others that run; by default `max_loras`."""
    lora_dirs: str = ""
    """Folders from which adapters may be loaded at run time, separated by commas or as a list in JSON; by default none
    are."""
    adapter_store: Annotated[int, msgspec.Meta(ge=16 << 20)] = 4 << 30
    """Bytes on the broker's disk for adapters, with `enable_lora`, such as 4GiB."""
    data_parallel_size: Positive = 1
    """Replicas of the model: pairs of a scheduler and an executor that share one queue."""
    seed: int = 0
    """Seed of random weights, and of requests without a seed unless 0."""
    api_key: str = ""
    """Key that clients must send; by default none is needed."""
    api_key_file: str = ""
    """File with one tenant per line, `name:key`, read again when it changes; by default there are no tenants."""
    spec_type: Literal["auto", "none", "suffix", "ngram", "draft_model", "eagle3", "mtp"] = "auto"
    """How tokens are drafted, which a step then verifies: suffix and ngram repeat what followed the same tokens earlier
    in the text, draft_model asks a smaller model, none drafts nothing, auto is as `speculative-config` says; the others
    are not supported yet."""
    speculative_config: str = ""
    """Method and limits of drafts, in JSON with vLLM's keys, as {"method": "ngram", "num_speculative_tokens": 4}."""
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    """summary: answers of OpenAI's routes with one choice have `metrics.speculative_decoding`, vLLM's figures of their
    drafts."""
    lease_window: Positive = 8
    """Steps that the executor may run before the scheduler knows their results."""
    itl_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Target step time in milliseconds, to which the tokens per step adapt; by default 50 on a CPU, else none."""
    nats_url: str = ""
    """URL of the NATS server, or those of a cluster, separated by commas; by default an embedded server is started."""
    nats_port: Port | None = None
    """Port of the embedded NATS server; by default 4222, or any free port if that is taken; 0: any free port. The
    servers of a cluster take this port and those that follow."""
    nats_max_store: Annotated[int, msgspec.Meta(ge=16 << 20)] = MAX_STORE
    """Bytes on the broker's disk for waiting requests and for the records of ended ones; by default 1 GiB."""
    nats_user: str = ""
    """NATS user of the services; by default each service is the user of its name, if there is a password."""
    nats_password: str = ""
    """NATS password of the services."""
    drain_timeout: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """Seconds in which a service, or the whole stack, that is told to end finishes or hands over what it has."""
    nats_secrets: str = ""
    """Folder with the NATS password of each service, in a file of its name, instead of one password for all."""
    nats_tls_ca: str = ""
    """File with the certificates (PEM) that vouch for the NATS server; by default those of the system."""
    nats_tls_cert: str = ""
    """File with the certificate (PEM) that services and commands show to the NATS server."""
    nats_tls_key: str = ""
    """File with the private key of that certificate."""
    tenant: str = ""
    """Name of the tenant whose key `api-key` is, for commands that are clients."""
    log_format: Literal["console", "json"] | None = None
    """Format of log lines; by default console on a terminal, else json."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    metrics_compat: Literal["vllm"] | None = None
    """vllm: `/metrics` also has the names that dashboards, load balancers and autoscalers for vLLM read."""
    trace_dir: str = ""
    """Folder that spans are written to; by default none are written."""
    trace_slow: Duration | None = None
    """Where spans are sent or written, have all of those requests that take longer than this, such as 10s, or that the
    server fails, whether they are sampled or not.
    """
    log_prompts: bool = False
    """Log the beginning of each prompt: by default no text of a client is logged."""
    prefix_cache: bool = True
    """Share the KV blocks of equal prefixes."""
    ssl_certfile: str = ""
    """File with the HTTP server's certificate and its chain, in PEM; by default HTTP is not encrypted."""
    ssl_keyfile: str = ""
    """File with the certificate's private key, without a passphrase; by default the certificate's file has it too."""
    ssl_ca_certs: str = ""
    """File with the authorities whose certificates HTTP clients must have; by default they need none."""
    max_connections: Positive = 8192
    """HTTP connections that may be open at once; beyond them idle ones are closed, then requests refused with 503."""
    max_queue_wait: Duration | None = None
    """Longest wait in the queue, such as 10s, 500ms or 2m: a request that would wait longer is refused with 429; by
    default the queue is bounded only by the number and bytes of its requests, and by their own deadlines."""
    nats_cluster: Literal[1, 3, 5] = 1
    """Embedded NATS servers, as one cluster: 1, 3 or 5."""
    nats_replicas: Literal[1, 3, 5] | None = None
    """NATS servers that keep a copy of every waiting request: 1, 3 or 5; by default 1, and 3 with nats-cluster."""

    console: bool = True
    """Serve the console, a page at `/` where people talk with the model and see the services at work."""
    demo_faults: bool = False
    """Let the console kill, freeze and drain services: only for demonstrations."""
    strict: bool = False
    """Refuse HTTP requests with unknown fields, which are else ignored and named in the header Pagewire-Warning."""
    allowed_origins: str = ""
    """Web sites whose scripts may send HTTP requests, separated by commas or as a list in JSON; `*`: all; by default
    none."""
    allowed_hosts: str = ""
    """Names by which clients may call a server on loopback without a key, beside this machine's own, such as that of a
    proxy before it; separated by commas or as a list in JSON; `*`: all."""


FIELDS = {field.encode_name: field for field in msgspec.structs.fields(Settings)}
STACK_WIDE = frozenset(
    {
        "host",
        "port",
        "adapter-store",
        "allowed-hosts",
        "allowed-origins",
        "api-key",
        "api-key-file",
        "console",
        "demo-faults",
        "drain-timeout",
        "gpu-memory-utilization",
        "log-format",
        "log-level",
        "max-connections",
        "metrics-compat",
        "nats-cluster",
        "nats-max-store",
        "nats-password",
        "nats-port",
        "nats-replicas",
        "nats-secrets",
        "nats-tls-ca",
        "nats-tls-cert",
        "nats-tls-key",
        "nats-url",
        "nats-user",
        "per-request-spec-decode-metrics",
        "ssl-ca-certs",
        "ssl-certfile",
        "ssl-keyfile",
        "strict",
        "tenant",
        "trace-dir",
        "trace-slow",
    }
)
"""Settings that all models of a stack share. Each model may have its own values of the others."""


def seconds(duration: str) -> float:
    """Returns the seconds of a `Duration`.

    >>> seconds("500ms"), seconds("2m")
    (0.5, 120.0)
    """
    number = duration.rstrip("hms")
    return float(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[duration.removeprefix(number)]


def names(text: str) -> list[str]:
    """Returns the items of a setting that has several, separated by commas or as a list in JSON.

    >>> names("a, b"), names('["a", "b"]')
    (['a', 'b'], ['a', 'b'])

    Raises:
        ConfigurationError: the list is malformed.
    """
    if not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{text} is no list of texts in JSON: {error}") from error


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config: Path | None = None) -> Settings:
    """Combines the sources into settings. `flags` has values or their text by kebab-case name; `config`: TOML or YAML.

    Raises:
        ConfigurationError: a name is unknown, or a value has the wrong type or is out of range.
    """
    shared, _ = config_file.read(config)
    return _settings({**shared, **settings_in(environ, FIELDS), **flags})


def names_model(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config: Path | None = None) -> bool:
    """Returns whether a flag, a variable or `config` names a model.

    Raises:
        ConfigurationError: `config` cannot be read.
    """
    shared, tables = config_file.read(config)
    return "model" in {**shared, **settings_in(environ, FIELDS), **flags} or bool(tables)


def load_models(
    models: Sequence[str],
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    config: Path | None = None,
) -> list[Settings]:
    """Returns the settings of each model that is named, or else that has a table in `config`, or else of the only one.

    A model's table comes after flags and variables, and before what the file says of all models. Names that requests
    use are one for each of several models, in their order.

    Raises:
        ConfigurationError: as in `load`; or a table is of no named model, or there are more or fewer names than models.
    """
    shared, tables = config_file.read(config)
    explicit = {**settings_in(environ, FIELDS), **flags}
    models = models or ([explicit["model"]] if explicit.get("model") else list(tables)) or [shared.get("model", "")]
    for model, table in tables.items():
        if model not in models:
            raise ConfigurationError(f"the table of {model} is of no served model{did_you_mean(model, models)}")
        for name in sorted(table.keys() & (STACK_WIDE | {"model"})):
            raise ConfigurationError(f"{name} is the same for all models: move it out of the table of {model}")
    own: list[dict[str, Any]] = [{"model": model} for model in models]
    if len(models) > 1 and "served-model-name" in (common := {**shared, **explicit}):
        served = names(str(common["served-model-name"]).replace(" ", ","))
        if len(served) != len(models):
            raise ConfigurationError(
                f"served-model-name has {len(served)} names for {len(models)} models: give one for each, in their order"
            )
        own = [{**each, "served-model-name": name} for each, name in zip(own, served, strict=True)]
    return [_settings({**shared, **tables.get(each["model"], {}), **explicit, **each}) for each in own]


def _settings(values: dict[str, Any]) -> Settings:
    for name in values.keys() - FIELDS.keys():
        raise ConfigurationError(f"there is no setting {name!r}{did_you_mean(name, FIELDS)}")
    values = {name: sizes.number(name, value) if isinstance(value, str) else value for name, value in values.items()}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"invalid setting: {_explained(str(error), values)}") from error


def _explained(error: str, values: Mapping[str, Any]) -> str:
    """Returns the library's error with the setting's name and value in front. A value that must be a text may be a key.

    >>> _explained("Expected `int`, got `str` - at `$.port`", {"port": "http"})
    "port is 'http'. Expected `int`, got `str`"
    """
    reason, _, name = error.rpartition(" - at `$.")
    name = name.rstrip("`")
    if name not in values:
        return " ".join(error.split())
    if "matching regex" in reason:
        reason = "Expected a number with its unit, such as 500ms, 10s, 2m or 1h"
    shown = "a value" if "Expected `str" in reason else repr(values[name])
    return f"{name} is {shown}. {' '.join(reason.split())}"


def nats_urls(settings: Settings) -> str:
    """Returns the URLs of the NATS servers, separated by commas; by default they are on this machine."""
    first = settings.nats_port or DEFAULT_NATS_PORT
    return settings.nats_url or ",".join(f"nats://127.0.0.1:{first + i}" for i in range(settings.nats_cluster))


def without_logins(urls: str) -> str:
    """Returns URLs of NATS servers without the user and password in them, which not everybody may see.

    >>> without_logins("nats://user:secret@a:4222,tls://b")
    'nats://a:4222,tls://b'
    """
    return ",".join(re.sub(r"//[^/]*@", "//", url.strip()) for url in urls.split(","))


def store_replicas(settings: Settings) -> int:
    """Returns the number of copies that NATS servers keep of what is stored."""
    return settings.nats_replicas or (1 if settings.nats_url else min(3, settings.nats_cluster))


def uses_flashinfer(settings: Settings) -> bool:
    """Returns whether FlashInfer computes attention, by either of its names."""
    return settings.attention_backend.lower() == "flashinfer"


def to_environment(settings: Settings) -> dict[str, str]:
    """Returns the environment variables from which `load` gets the same settings in another process."""
    values = msgspec.to_builtins(settings)
    return {variable(name): str(value) for name, value in values.items() if value is not None}
