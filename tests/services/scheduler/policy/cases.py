"""Sequences for tests of what lies beside the policy."""

from itertools import count

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.messages.work import Sampling

_numbers = count(1)


def sequence(tokens: int | list[int] = 4, **fields: object) -> Sequence:
    """A new sequence; a number stands for so many equal tokens. It arrives after all others."""
    prompt = [7] * tokens if isinstance(tokens, int) else tokens
    number = next(_numbers)
    values: dict[str, object] = {"arrival_order": number} | fields
    return Sequence(number, prompt, len(prompt), Sampling(16), **values)  # type: ignore[arg-type]
