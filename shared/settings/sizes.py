"""The settings whose values may have a unit, such as 4GiB."""

import re

from pagewire.shared.errors import ConfigurationError

SIZES = frozenset(
    {"adapter-store", "kv-cache-memory", "max-model-len", "max-num-batched-tokens", "model-memory", "nats-max-store"}
)
"""Names of the settings."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtT])(iB|B)?")


def number(name: str, text: str) -> object:
    """Returns the number that a text with a unit means, as vLLM reads it.

    >>> number("max-model-len", "4k"), number("max-model-len", "4K"), number("kv-cache-memory", "1GiB")
    (4000, 4096, 1073741824)

    Raises:
        ConfigurationError: the setting is a size, and the text is none.
    """
    if name == "max-model-len" and text in {"auto", "-1"}:
        return None
    if name not in SIZES or text.removeprefix("-").isdecimal() or text.lower() == "null":
        return text
    size = _SIZE.fullmatch(text)
    if size is None:
        raise ConfigurationError(f"{name} must be a whole number, alone or with a unit as in 4GiB, not {text!r}")
    digits, unit, suffix = size.groups()
    binary = suffix == "iB" or (not suffix and unit.isupper())
    return int(float(digits) * (1024 if binary else 1000) ** (1 + "kmgt".index(unit.lower())))
