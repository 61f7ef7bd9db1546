"""Sampling parameters: checks those of a request and resolves them for the device.

Ranges and special values are vLLM's. Those of the scalar parameters are in `pagewire.shared.sampling`.
"""

import hashlib
import math
import secrets

from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages import pack
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.messages.work import GREEDY, Sampling
from pagewire.shared.sampling import GREEDY_BELOW, PARAMETERS, pack_record

MAX_STOPS = 64
"""Maximum stop strings of a request."""
MAX_STOP_LENGTH = 1024
"""Maximum characters of a stop string."""
MAX_STOP_TOKENS = 1024
"""Maximum stop tokens of a request."""
MAX_BEAMS = 16
"""Maximum beams of a search."""
MAX_BEAM_STOPS = 64
"""Maximum stop tokens of a beam search, the model's own included: every step reports that many more candidates."""
NOT_IN_BEAM_SEARCH: dict[str, tuple[object, ...]] = {"seed": (None, -1), "min_tokens": (0,), "stop": ([],)}
"""Fields that a beam search refuses in addition to `PARAMETERS`, except for these neutral values."""
NOT_BUILT = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
)
"""Unsupported fields, which are refused unless they have their default or a value of `NEUTRAL`."""

NEUTRAL: dict[str, tuple[object, ...]] = {"logit_bias": (None, {})}
"""The values of these fields that change nothing, where it is not the default alone."""

_DEFAULTS = SamplingParams()


def check(params: SamplingParams, vocab_size: int) -> None:
    """Checks the ranges of values, and that unsupported fields are not used.

    Raises:
        InvalidRequest: a parameter is invalid or unsupported; the message names it.
    """
    for name in NOT_BUILT:
        if getattr(params, name) not in NEUTRAL.get(name, (getattr(_DEFAULTS, name),)):
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    _require(params.n >= 1, f"n must be at least 1, not {params.n}")
    for parameter in PARAMETERS:
        parameter.check(getattr(params, parameter.name))
    if params.beam_width is None:
        _require(
            params.n == 1 or not _greedy(params), "n must be 1 when temperature is 0: greedy completions are all equal"
        )
        _require(params.length_penalty == 1.0, "length_penalty is that of a beam search: set beam_width too")
    else:
        _check_beams(params, params.beam_width, vocab_size)
    _require(params.seed is None or -(2**63) <= params.seed < 2**64, "seed must be an integer of 64 bits")
    _check_length(params)
    _check_stops(params, vocab_size)


def stop_strings(params: SamplingParams) -> tuple[str, ...]:
    """Returns the stop strings, each once, in the order given."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    return tuple(dict.fromkeys(stops))


def stop_tokens(params: SamplingParams) -> tuple[int, ...]:
    """Returns the stop tokens that the client named, each once, in the order given."""
    return tuple(dict.fromkeys(params.stop_token_ids))


def draw_seed(params: SamplingParams, deployment_seed: int, digest: bytes) -> int:
    """Returns 64 bits: the request's seed, else one derived from the deployment's and the body, else a random one."""
    if params.seed is not None and params.seed != -1:
        return params.seed % 2**64
    if deployment_seed:
        return int.from_bytes(hashlib.sha256(b"%d " % deployment_seed + digest).digest()[:8], "little")
    return secrets.randbits(63)


def resolve(params: SamplingParams, *, seed: int, max_tokens: int, eos: frozenset[int], vocab_size: int) -> Sampling:
    """Returns the resolved parameters for the device.

    Raises:
        InvalidRequest: a beam search has too many stop tokens.
    """
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
    beams = params.beam_width or 0
    greedy = _greedy(params) or beams > 0
    if beams:
        _check_candidates(beams, len(stop_ids), vocab_size)
    return Sampling(
        max_tokens=max_tokens,
        record=GREEDY if greedy else pack_record(**_columns(params, vocab_size)),
        stop_ids=pack(sorted(stop_ids)),
        min_tokens=params.min_tokens,
        seed=seed,
        beam_width=beams,
        length_penalty=params.length_penalty,
        candidates=beams + len(stop_ids) if beams else 0,
    )


def _columns(params: SamplingParams, vocab_size: int) -> dict[str, float]:
    """Returns the value of each column that is a client's field."""
    return {parameter.name: parameter.resolve(getattr(params, parameter.name), vocab_size) for parameter in PARAMETERS}


def _check_beams(params: SamplingParams, width: int, vocab_size: int) -> None:
    _require(1 <= width <= MAX_BEAMS, f"beam_width must be between 1 and {MAX_BEAMS}, not {width}")
    _require(params.n <= width, f"n must be at most beam_width, which is {width}, not {params.n}")
    _require(math.isfinite(params.length_penalty), f"length_penalty must be finite, not {params.length_penalty}")
    columns = _columns(params, vocab_size)
    refused = [p.name for p in PARAMETERS if columns[p.name] not in (p.neutral, getattr(_DEFAULTS, p.name))]
    refused += [name for name, harmless in NOT_IN_BEAM_SEARCH.items() if getattr(params, name) not in harmless]
    if refused:
        raise InvalidRequest(f"{refused[0]} has no meaning in a beam search: leave it out, or leave out beam_width")


def _check_candidates(width: int, stops: int, vocab_size: int) -> None:
    """Checks that every step has enough candidates that do not end the text."""
    _require(
        stops <= MAX_BEAM_STOPS, f"there are {stops} stop tokens, at most {MAX_BEAM_STOPS} are allowed with beam_width"
    )
    _require(
        width + stops <= vocab_size,
        f"beam_width {width} and {stops} stop tokens exceed the {vocab_size} tokens there are",
    )


def _check_length(params: SamplingParams) -> None:
    _require(
        params.max_tokens is None or params.max_tokens >= 1, f"max_tokens must be at least 1, not {params.max_tokens}"
    )
    _require(params.min_tokens >= 0, f"min_tokens must not be negative, as {params.min_tokens} is")
    _require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}",
    )


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    stops = stop_strings(params)
    _require(len(stops) <= MAX_STOPS, f"there are {len(stops)} stop strings, at most {MAX_STOPS} are allowed")
    _require(all(stops), "a stop string is empty")
    longest = max(map(len, stops), default=0)
    _require(
        longest <= MAX_STOP_LENGTH, f"a stop string has {longest} characters, at most {MAX_STOP_LENGTH} are allowed"
    )
    tokens = stop_tokens(params)
    _require(
        len(tokens) <= MAX_STOP_TOKENS,
        f"stop_token_ids has {len(tokens)} tokens, at most {MAX_STOP_TOKENS} are allowed",
    )
    for token in tokens:
        _require(
            0 <= token < vocab_size, f"stop_token_ids has token {token}, outside the vocabulary of {vocab_size} tokens"
        )


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
