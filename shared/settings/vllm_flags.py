"""vLLM's command-line flags: aliases of settings, flags without effect, and the advice for all others.

Flags that are not named here have vLLM's name and meaning, or are Pagewire's own.
"""

import re

ALIASES = {
    "enable-prefix-caching": "prefix-cache",
    "kv-cache-memory-bytes": "kv-cache-memory",
    "num-gpu-blocks-override": "num-kv-blocks",
    "shutdown-timeout": "drain-timeout",
}
"""Settings by vLLM's name, where the names differ."""

IGNORED = {
    "async-scheduling": "the executor never waits for the scheduler",
    "disable-log-requests": "--log-level warning hides the line of each request",
    "disable-log-stats": "no statistics are logged",
    "disable-uvicorn-access-log": "--log-level warning hides the line of each request",
    "enable-chunked-prefill": "prompts are always split into chunks",
    "enable-prompt-tokens-details": "usage always has them",
    "enable-request-id-headers": "answers always have X-Request-Id",
    "enable-server-load-tracking": "/load always counts",
    "use-tqdm-on-load": "loading shows a bar on a terminal",
}
"""Flags without a value that are accepted without effect, by name, and why."""

_MEDIA = "text is the only input: choose a text model"
_PARALLEL = "a model runs on one machine: use --tensor-parallel-size, or --data-parallel-size for several replicas"
_TUNED = "Pagewire chooses this itself: leave it out"
REPLACEMENTS = [
    (
        r"tokenizer-.*|skip-tokenizer-init|renderer-.*",
        "the tokenizer is that of --tokenizer, by default the model's: put its files there",
    ),
    (r"trust-.*", "a checkpoint's own code could do anything on this machine, so it is never run: leave it out"),
    (r"(.*-)?quantization.*", "the weights' own format decides: give a checkpoint in the wanted format"),
    (r"lora-dtype", "adapters have the dtype of the model: leave it out"),
    (r"lora-.*|.*-loras?|.*-lora-.*", "adapters change the products of attention and of dense layers: leave it out"),
    (r".*speculative.*|spec-.*|.*-spec-.*", "set the keys of --speculative-config"),
    (r".+-revision", "download that revision and give its folder"),
    (r"hf-token", "set the variable HF_TOKEN"),
    (r"hf-.*|config-format|model-class-overrides|override-generation-config", "edit the files in the model's folder"),
    (r"download-dir", "set the variable HF_HOME"),
    (r"safetensors-.*|model-loader-.*|ignore-patterns|pt-load-.*", "weights are safetensors or GGUF"),
    (r"model-impl|runner|convert|pooler-.*|io-processor-.*", "generating models are the only ones: leave it out"),
    (r"pipeline-parallel-.*|(nnodes|node-rank|master-.*|headless)", _PARALLEL),
    (r"(decode-context|prefill-context|dcp|cp|data-parallel|dp|distributed|cpu-distributed)-.*", _PARALLEL),
    (
        r"(.*ep|.*eplb|.*expert.*|all2all.*|.*dbo.*|ubatch.*)(-.*)?|enable-hc-sp|.*nccl.*|.*custom-all-red.*|ray-.*",
        _PARALLEL,
    ),
    (r"max-parallel-loading-workers|worker-.*|device-ids|numa-.*|enable-batch-sharded.*|.*shm-tensor.*", _PARALLEL),
    (r"api-server-count", "start more gateways: python -m pagewire.services.gateway"),
    (r"config|uds|root-path|middleware|grpc.*|enable-scale-out", "put a proxy in front of --host and --port"),
    (r"(.*-)?mm-.*|.*media.*|video-.*|language-model-only|interleave-.*|.*flash-late.*|.*prompt-embeds", _MEDIA),
    (r"swap-space|cpu-offload-.*|offload-.*|kv-offloading-.*", "nothing is offloaded: lower --max-num-seqs"),
    (r"kv-transfer-.*|kv-events-.*|ec-transfer-.*|ec-.*", "caches are not moved between machines: leave it out"),
    (r"enforce-eager|.*cudagraph.*|compilation-config|optimization-level|performance-mode", _TUNED),
    (r".*(attention|attn|mamba|moe|linear|gdn|kda|indexer|kernel|flashinfer|op-priority|ssm|flash).*", _TUNED),
    (r"prefix-cach.*|prefix-match.*|prefix-cache-.*|kv-sharing.*|kv-cache-dtype-.*|swa-.*|.*hybrid-kv.*", _TUNED),
    (r"long-prefill-.*|scheduler-.*|watermark|prefill-schedule.*|max-num-scheduled.*|.*sliding-window", _TUNED),
    (r"stream-interval", "tokens are merged while a reader lags: leave it out"),
    (r"scheduling-policy", "requests with a lower `priority` run earlier, first come first served among equals"),
    (r"max-num-queued-.*|max-num-active-seqs", "bound the wait instead: --max-queue-wait 10s"),
    (
        r"uvicorn-log-level|log-config-file|logging-config|log-error-stack|max-log-len",
        "use --log-level, --log-format",
    ),
    (
        r"enable-log-.*|.*-access-log.*|aggregate-.*|enable-logging-.*|jit-monitor.*",
        "use --trace-dir",
    ),
    (r"otlp-.*|collect-.*|profiler-.*|.*nvtx.*|trace-.*|enable-trace.*", "set the OTEL_ variables, or --trace-dir"),
    (r".*metrics.*|custom-histogram.*", "docs/operations.md lists the figures and how to read them"),
    (r"allow-credentials|allowed-(methods|headers)", "--allowed-origins allows all methods and headers"),
    (r"ssl-cert-reqs|enable-ssl-refresh|ssl-ciphers", "--ssl-ca-certs makes certificates of clients necessary"),
    (r"h11-.*", "the limits of HTTP are fixed: docs/operations.md names them"),
    (
        r"chat-template-content.*|response-role|default-chat-.*",
        "send chat_template_kwargs in requests",
    ),
    (r"(tool|reasoning)-.*|.*reasoning.*|enable-auto-tool-.*|exclude-tools-.*|structured-outputs-.*", _TUNED),
    (r"enable-sleep-mode|sleep-.*|weight-transfer-.*|.*cumem.*", "stop the stack and start it again: it takes seconds"),
    (r"disable-fastapi-docs|enable-offline-docs|.*tokenizer-info.*", "put a proxy in front that hides the paths"),
    (
        r"return-tokens-as.*|enable-force-include-usage|enable-per-request-.*|tokens-only",
        "ask for it in requests",
    ),
    (r"sse-keep-alive-interval", "streams need no keep-alive: clients wait up to 600 s"),
]
"""Patterns of flags that are refused, and the advice for them; the first match counts."""
NO_COUNTERPART = "there is no such flag here: leave it out (`--help` lists the flags)"
"""Advice for a flag without a pattern."""


def instead(flag: str) -> str:
    """Returns the advice for a flag of vLLM that is not supported. `flag` has no dashes in front.

    >>> instead("hf-token")
    'set the variable HF_TOKEN'
    """
    for pattern, text in REPLACEMENTS:
        if re.fullmatch(pattern, flag):
            return text
    return NO_COUNTERPART
