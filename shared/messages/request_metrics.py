"""The figures of one request, part of its last frame to the client."""

import msgspec


class SpeculativeDecoding(msgspec.Struct):
    """The drafted tokens of a request, with vLLM's names."""

    num_spec_steps: int
    """Drafts that steps have verified."""
    num_draft_tokens: int
    """Tokens of these drafts."""
    num_accepted_draft_tokens: int
    """Tokens among them that were right."""
    acceptance_histogram: list[int]
    """Entry i: drafts of which i tokens were right."""
    mean_acceptance_length: float
    """Tokens per step with a draft: those that were right, and the next one."""
    draft_acceptance_rate: float
    """Share of the drafted tokens that were right."""


class Metrics(msgspec.Struct):
    """The times of a request in seconds, with vLLM's names. A time is None if it began before the detokenizer adopted
    the request."""

    queued_time: float | None
    """Time from the acceptance to the first step with a token of the prompts."""
    prefill_time: float | None
    """Time from that step to the first generated token."""
    decode_time: float | None
    """Time from the first generated token to the end."""
    e2e_latency: float
    """Time from the acceptance to the end."""
    speculative_decoding: SpeculativeDecoding | msgspec.UnsetType = msgspec.UNSET
    """The drafted tokens, if there were any since the detokenizer has the request."""
