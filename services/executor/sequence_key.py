"""The random key of a sequence, from which every device draws the same numbers."""

_MASK = (1 << 64) - 1


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """Returns the 64-bit random key of a completion, by a chain of splitmix64 (Steele et al., 2014).

    It never changes, so that a recovered sequence goes on with the same tokens, also after an update:

    >>> hex(sequence_key(seed=1, prompt_index=2, choice_index=3))
    '0xd0734750fde362b3'
    """
    key = _splitmix64(seed)
    key = _splitmix64(key ^ prompt_index)
    return _splitmix64(key ^ choice_index)


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
