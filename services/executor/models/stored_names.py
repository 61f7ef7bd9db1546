"""The names of a decoder's tensors in checkpoints that also have those for images or sound, or lack a prefix."""

from collections.abc import Collection, Iterable, Mapping

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


def with_prefix(stored: Mapping[str, str], needed: Collection[str]) -> dict[str, str]:
    """Returns the stored names by names that begin as the `needed` ones do, where checkpoints leave the beginning out.

    The hub's GPT-2 was saved without its output layer, so without the prefix that tells the two apart.

    >>> with_prefix({"wte.weight": "wte.weight"}, ["transformer.wte.weight"])
    {'transformer.wte.weight': 'wte.weight'}
    """
    prefixes = dict.fromkeys(f"{name.partition('.')[0]}." for name in needed)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in stored) and any(prefix + name in needed for name in stored):
            return {name if name in needed else prefix + name: place for name, place in stored.items()}
    return dict(stored)
