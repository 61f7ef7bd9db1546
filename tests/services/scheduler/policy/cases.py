"""Sequences for the tests of the policy's parts."""

from itertools import count

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.messages.work import Sampling

_numbers = count(1)


def sequence(tokens: int | list[int] = 4, **fields: object) -> Sequence:
    """Returns a new sequence, which arrives after all others; a number stands for so many equal tokens."""
    prompt = [7] * tokens if isinstance(tokens, int) else tokens
    number = next(_numbers)
    values: dict[str, object] = {"arrival_order": number} | fields
    return Sequence(number, prompt, len(prompt), Sampling(16), **values)  # type: ignore[arg-type]
