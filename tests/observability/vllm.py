"""The series that the Grafana boards of vLLM, the Gateway API inference extension and autoscalers ask for.

The names are those of vLLM's `examples/observability` boards; the expressions are written anew.
"""

HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
)
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
)


def queries() -> list[str]:
    """Expressions as the boards have them, for one model."""
    model = 'model_name="$model_name"'
    quantiles = [
        f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{{{model}}}[$__rate_interval])))"
        for name in HISTOGRAMS
        for q in (0.5, 0.99)
    ]
    means = [
        f"rate({name}_sum{{{model}}}[$__rate_interval]) / rate({name}_count{{{model}}}[$__rate_interval])"
        for name in HISTOGRAMS
    ]
    heat = [f"sum by (le) (increase({name}_bucket{{{model}}}[$__rate_interval]))" for name in HISTOGRAMS]
    rates = [f"rate({name}{{{model}}}[$__rate_interval])" for name in COUNTERS]
    ended = [f"sum by (finished_reason) (increase(vllm:request_success_total{{{model}}}[$__rate_interval]))"]
    scaled = ["sum(vllm:num_requests_waiting)", "sum by (reason) (vllm:num_requests_waiting_by_reason)"]
    return [*quantiles, *means, *heat, *rates, *[f"{name}{{{model}}}" for name in GAUGES], *ended, *scaled]
