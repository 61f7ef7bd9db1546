"""The sampling parameters of a slot, made of a plan's columns."""

from typing import NamedTuple

import numpy as np

from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.devices.protocol import Edits
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.services.executor.steps.packed_columns import column
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.sampling_parameters import Record, is_penalized, unpack_record


class SamplingSettings(NamedTuple):
    """Sampling parameters of a slot, which a fork inherits."""

    record: Record
    stop_ids: list[int]
    edits: Edits | None
    """Edits of the logits, without the tokens of the sequence."""
    adapter: SequenceAdapter | None = None
    cache_salt: str = ""

    @classmethod
    def of(cls, added: AddSlot, grammar: SequenceGrammar | None, adapter: SequenceAdapter | None) -> "SamplingSettings":
        """Returns the parameters of a new sequence, with its grammar and its adapter."""
        complete = sampling_record(added)
        edits = _edits_of(added, complete, grammar)
        return cls(complete, unpack(added.sampling.stop_ids), edits, adapter, added.cache_salt)


def sampling_record(added: AddSlot) -> Record:
    """Returns the sampling record of a sequence: the request's record, completed with the sequence's own columns."""
    sampling = added.sampling
    complete = unpack_record(sampling.record)
    complete["key"] = sequence_key(sampling.seed, added.prompt_index, added.choice_index)
    if not sampling.grammar:  # which knows where it must end before
        complete["min_length"] = added.prompt_tokens + sampling.min_tokens
    complete["num_candidates"] = sampling.candidates
    complete["num_logprobs"] = sampling.logprobs + 1
    complete["num_prompt_logprobs"] = sampling.prompt_logprobs + 1 if added.reports_prompt else 0
    return complete


def _edits_of(added: AddSlot, complete: Record, grammar: SequenceGrammar | None) -> Edits | None:
    """Returns the edits of a sequence with this record, without its tokens; None if there are none."""
    sampling, penalized = added.sampling, is_penalized(complete)
    if not (penalized or sampling.bias_ids or sampling.allowed_ids or sampling.bad_words or grammar):
        return None
    return Edits(
        bias_ids=column(sampling.bias_ids),
        biases=np.frombuffer(sampling.biases, "<f4").copy(),
        allowed_ids=column(sampling.allowed_ids),
        bad_words=column(sampling.bad_words),
        penalized=penalized,
        num_prompt_tokens=added.prompt_tokens,
        grammar=grammar,
    )
