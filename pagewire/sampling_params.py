"""The sampling parameters, under the name of vLLM's module."""

import msgspec

from pagewire.shared.messages.client import SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]


class BeamSearchParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a beam search. Names and defaults are vLLM's; the search ranks beams as `transformers` does."""

    beam_width: int
    """Number of beams, all of which are returned."""
    max_tokens: int
    """Maximum number of generated tokens."""
    ignore_eos: bool = False
    """Whether generation continues after the model's EOS token."""
    temperature: float = 0.0
    """Must be 0: beam search does not sample."""
    length_penalty: float = 1.0
    """Exponent of the length by which a beam's score is divided."""
    include_stop_str_in_output: bool = False
    """Without effect: there are no stop strings, and the text of a beam has all of its tokens."""
