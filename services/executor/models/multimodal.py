"""The tensors of a decoder in a checkpoint that also has those for images or sound."""

from collections.abc import Iterable

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""Prefixes of the decoder's tensors there, and the prefixes that they have in a checkpoint of the decoder alone."""
OTHERS = ("audio_tower.", "visual.", "vision_model.", "vision_tower.")
"""Prefixes of other tensors in checkpoints whose decoder has its own names."""


def decoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the stored name of each tensor of the decoder, by its name in a checkpoint of the decoder alone."""
    names = list(stored)
    renamed = {
        new + name.removeprefix(old): name for name in names for old, new in PREFIXES.items() if name.startswith(old)
    }
    if renamed:
        return renamed | {name: name for name in names if name.startswith("lm_head.")}
    return {name: name for name in names if not name.startswith(OTHERS)}
