"""The variants of `kernels/triton/sampling/edit_logits.py` that devices launch."""

import triton

from pagewire.kernels.triton.sampling import sampling_columns
from pagewire.kernels.triton.sampling.edit_logits import TILE, edit_logits_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.tensors import SAMPLING_TENSORS, VOCABULARIES


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    columns = ("min_length", "repetition_penalty", "frequency_penalty", "presence_penalty")
    tables = ("bias_ids", "bias", "stop_ids", "edits", "allowed", "seen", "bad_words", "bad_word_ends")
    tensors = {name: SAMPLING_TENSORS[name] for name in (*columns, *tables, "num_prompt_tokens")}
    tensors |= dict.fromkeys(("slots", "ends", "drafts", "masks", "state_tokens"), "i32")
    lengths = {
        "BIASES": sampling_columns.MAX_BIASES,
        "STOPS": sampling_columns.MAX_STOP_IDS,
        "BAD_IDS": sampling_columns.MAX_BAD_WORD_IDS,
    }
    padded = {f"PADDED_{name.removesuffix('_IDS')}": triton.next_power_of_2(width) for name, width in lengths.items()}
    sizes = {**lengths, **padded, "MOST_BAD": sampling_columns.MAX_BAD_WORDS, "TILE": TILE}
    return [
        Configuration(
            name=f"{vocabulary} tokens",
            kernel=edit_logits_kernel,
            tensors={**tensors, "logits": "fp32"},
            constants={"VOCABULARY": vocabulary, "WORDS": -(-vocabulary // 32), **sizes},
            spills=False,
        )
        for vocabulary in VOCABULARIES
    ]
