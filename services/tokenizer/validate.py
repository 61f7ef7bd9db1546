"""What is refused before any text is tokenized. Pure, like `sampling`, `prompts` and `limits` beside it."""

from pagewire.services.tokenizer import sampling
from pagewire.services.tokenizer.prompts import Chat, Ids, Texts, prompts_of
from pagewire.shared import subjects
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest

MAX_TIMEOUT_MS = 24 * 3600 * 1000
"""A day."""
PRIORITIES = range(-(2**31), 2**31)
"""32 bits."""
MAX_USER = 256
"""Characters."""
MAX_SALT = 256
"""Characters."""


def validate(request: GenerateRequest, vocab_size: int) -> Texts | Ids | Chat:
    """What the request asks to continue, once every other field is known to be usable.

    Raises:
        InvalidRequest: names the field and what it may be.
    """
    if request.request_id is not None and not subjects.is_token(request.request_id):
        raise InvalidRequest("request_id must have 1 to 64 characters out of A-Z, a-z, 0-9, _ and -")
    if not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidRequest(f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {request.timeout_ms}")
    if request.priority not in PRIORITIES:
        raise InvalidRequest(f"priority must be an integer of 32 bits, not {request.priority}")
    if len(request.user) > MAX_USER:
        raise InvalidRequest(f"user must have at most {MAX_USER} characters, not {len(request.user)}")
    if len(request.cache_salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt must have at most {MAX_SALT} characters, not {len(request.cache_salt)}")
    sampling.check(request.sampling, vocab_size)
    return prompts_of(request)
