"""The tensors of a decoder in a checkpoint that also has those for images or sound."""

from collections.abc import Iterable

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""Beginnings of the decoder's names there, and of the same names in a checkpoint of the decoder alone."""
OTHERS = ("audio_tower.", "visual.", "vision_model.", "vision_tower.")
"""Beginnings of other names in checkpoints whose decoder has its own names."""


def decoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the stored name of each tensor of the decoder, by its name in a checkpoint of the decoder alone."""
    names = list(stored)
    renamed = {
        new + name.removeprefix(old): name for name in names for old, new in PREFIXES.items() if name.startswith(old)
    }
    if renamed:
        return renamed | {name: name for name in names if name.startswith("lm_head.")}
    return {name: name for name in names if not name.startswith(OTHERS)}
