"""Checks the sampling parameters of a request, and resolves them for the device.

Ranges and special values are vLLM's. For scalar parameters they are in `pagewire.shared.sampling_parameters`.
"""

import hashlib
import math
from array import array
from collections.abc import Sequence, Set

from pagewire.shared.errors import invalid_field
from pagewire.shared.messages import pack
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.messages.work import GREEDY, Sampling
from pagewire.shared.sampling_parameters import GREEDY_BELOW, PARAMETERS, PENALTIES, pack_record

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
NOT_IN_BEAM_SEARCH: dict[str, tuple[object, ...]] = {
    "best_of": (None,),
    "seed": (None, -1),
    "stop": ([],),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
}
"""Fields that a beam search refuses in addition to `PARAMETERS`, except for these neutral values."""
MAX_BIASES = 1024
"""Maximum tokens with a bias."""
MAX_BIAS = 100.0
"""Bound to which biases of either sign are clamped, as OpenAI does."""
MAX_ALLOWED_TOKENS = 1024
"""Maximum allowed tokens of a request."""
MAX_BAD_WORDS = 128
"""Maximum bad words of a request, each of which counts once with a leading space and once without."""
MAX_BAD_WORD_TOKENS = 1024
"""Maximum tokens of all bad words together."""
NOT_IN_GRAMMAR = ("allowed_token_ids", "bad_words")
"""Fields that `structured_outputs` refuses: together they could allow no token at all."""

_DEFAULTS = SamplingParams()


def check(params: SamplingParams, vocab_size: int, max_logprobs: int = 20) -> None:
    """Checks the ranges of values, and which fields are used together. `max_logprobs` is the deployment's.

    Raises:
        InvalidRequest: a parameter is invalid or unsupported; the message names it.
    """
    if params.structured_outputs is not None:
        for name in NOT_IN_GRAMMAR:
            _require(not getattr(params, name), name, "cannot be used with structured_outputs: leave one of them out")
    if params.n < 1:
        raise invalid_field("n", f"must be at least 1, not {params.n}")
    _check_best_of(params)
    for parameter in PARAMETERS:
        parameter.check(getattr(params, parameter.name))
    if params.beam_width is None:
        _require(
            params.n == 1 or not _greedy(params),
            "n",
            "must be 1 when temperature is 0: greedy completions are all equal",
        )
        _require(params.length_penalty == 1.0, "length_penalty", "is that of a beam search: set beam_width too")
    else:
        _check_beams(params, params.beam_width, vocab_size)
    _require(params.seed is None or -(2**63) <= params.seed < 2**64, "seed", "must be an integer of 64 bits")
    _check_length(params)
    _check_stops(params, vocab_size)
    _check_edits(params, vocab_size)
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        _check_logprobs(name, num_logprobs(value, vocab_size), vocab_size if max_logprobs < 0 else max_logprobs)


def num_sequences(params: SamplingParams) -> int:
    """Returns how many completions are generated per prompt."""
    return max(params.n, params.best_of or 0)


def num_logprobs(value: int | None, vocab_size: int) -> int | None:
    """Returns the number of log-probabilities per token that a field `value` stands for: -1 stands for all."""
    return vocab_size if value == -1 else value


def stop_strings(params: SamplingParams) -> tuple[str, ...]:
    """Returns the stop strings, each once, in the order of the request."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    return tuple(dict.fromkeys(stops))


def stop_tokens(params: SamplingParams) -> tuple[int, ...]:
    """Returns the stop tokens that the request names, each once, in the order of the request."""
    return tuple(dict.fromkeys(params.stop_token_ids))


def bad_word_texts(params: SamplingParams) -> list[str]:
    """Returns every bad word without and with a leading space, for `bad_word_ids`."""
    words = dict.fromkeys(params.bad_words or ())
    return [text for word in words for text in (word.lstrip(), " " + word.lstrip())]


def bad_word_ids(encoded: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the lists of ids that may not be generated; `encoded` has the ids of each of the `bad_word_texts`.

    As in vLLM, the form with a space counts only if it begins with another id and has as many ids. A list with an id
    beyond the vocabulary is left out: the model cannot generate it.

    >>> bad_word_ids([[5], [9], [5, 6], [7]], vocab_size=10)
    ((5,), (9,), (5, 6))

    Raises:
        InvalidRequest: there are too many.
    """
    words: dict[tuple[int, ...], None] = {}
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        words[tuple(plain)] = None
        if spaced[:1] != plain[:1] and len(spaced) == len(plain):
            words[tuple(spaced)] = None
    words = {word: None for word in words if word and max(word) < vocab_size}
    count = sum(map(len, words))
    _require(
        len(words) <= MAX_BAD_WORDS and count <= MAX_BAD_WORD_TOKENS,
        "bad_words",
        f"are {len(words)} lists of {count} tokens together, at most {MAX_BAD_WORDS} and "
        f"{MAX_BAD_WORD_TOKENS} are allowed",
    )
    return tuple(words)


def draw_seed(params: SamplingParams, deployment_seed: int, digest: bytes, request_id: str) -> int:
    """Returns a seed of 64 bits: the request's, else one that follows from the body's digest and the deployment's seed,
    or where that is 0 the request's id, which is random unless the client chooses it.

    So a request that is sent again has the same text, whichever of its work items is computed.
    """
    if params.seed is not None and params.seed != -1:
        return params.seed % 2**64
    origin = b"%d " % deployment_seed if deployment_seed else b"id " + request_id.encode() + b" "
    return int.from_bytes(hashlib.sha256(origin + digest).digest()[:8], "little")


def resolve(
    params: SamplingParams,
    *,
    seed: int,
    max_tokens: int,
    eos: frozenset[int],
    vocab_size: int,
    bad_words: Sequence[Sequence[int]] = (),
    grammar: str = "",
) -> Sampling:
    """Returns the parameters for the device. `bad_words` is the result of `bad_word_ids`.

    With a grammar, EOS ends the text even with `ignore_eos`: the grammar allows EOS only where the text may end.

    Raises:
        InvalidRequest: a beam search has too many stop tokens, or no token is allowed at the beginning.
    """
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos and not grammar else eos)
    beams = params.beam_width or 0
    if beams:
        _check_candidates(beams, len(stop_ids), len(set(params.allowed_token_ids or ())) or vocab_size)
    return Sampling(
        max_tokens=max_tokens,
        record=_record(params, vocab_size, greedy=_greedy(params) or beams > 0),
        stop_ids=pack(sorted(stop_ids)),
        min_tokens=params.min_tokens,
        seed=seed,
        beam_width=beams,
        length_penalty=params.length_penalty,
        candidates=max(beams + len(stop_ids), num_logprobs(params.logprobs, vocab_size) or 0) if beams else 0,
        logprobs=_reported(params.logprobs, vocab_size, default=0 if num_sequences(params) > params.n else -1),
        prompt_logprobs=_reported(params.prompt_logprobs, vocab_size),
        grammar=grammar,
        **(_edits(params, bad_words, stop_ids) if _has_edits(params) else {}),
    )


def _has_edits(params: SamplingParams) -> bool:
    """Returns whether a request changes single logits. Few do."""
    return params.logit_bias is not None or params.allowed_token_ids is not None or params.bad_words is not None


def _edits(params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_ids: Set[int]) -> dict[str, bytes]:
    """Returns the fields of `Sampling` that change single logits.

    Raises:
        InvalidRequest: no token is allowed at the beginning.
    """
    biases = {token: max(-MAX_BIAS, min(MAX_BIAS, bias)) for token, bias in (params.logit_bias or {}).items()}
    allowed = sorted(set(params.allowed_token_ids or ()))
    if allowed:
        banned = {word[0] for word in bad_words if len(word) == 1} | (stop_ids if params.min_tokens else set())
        _require(
            not banned.issuperset(allowed),
            "allowed_token_ids",
            "are all banned at the beginning, by bad_words or as stop tokens below min_tokens",
        )
    return {
        "bias_ids": pack(biases),
        "biases": array("f", biases.values()).tobytes(),
        "allowed_ids": pack(allowed),
        "bad_words": pack(number for word in bad_words for number in (len(word), *word)),
    }


def _record(params: SamplingParams, vocab_size: int, *, greedy: bool) -> bytes:
    columns = _columns(params, vocab_size)
    if greedy:
        columns = {penalty.name: columns[penalty.name] for penalty in PENALTIES}
        if all(columns[penalty.name] == penalty.neutral for penalty in PENALTIES):
            return GREEDY
    return pack_record(**columns)


def _columns(params: SamplingParams, vocab_size: int) -> dict[str, float]:
    """Returns the value of each column of the record that is a field of the request."""
    return {parameter.name: parameter.resolve(getattr(params, parameter.name), vocab_size) for parameter in PARAMETERS}


def _reported(value: int | None, vocab_size: int, *, default: int = -1) -> int:
    """Returns the number of log-probabilities as `Sampling` has it: `default` if the request asks for none."""
    number = num_logprobs(value, vocab_size)
    return default if number is None else number


def _check_best_of(params: SamplingParams) -> None:
    best_of = params.best_of
    if best_of is not None:
        _require(best_of >= params.n, "best_of", f"must be at least n, which is {params.n}, not {best_of}")
        _require(
            best_of == 1 or params.beam_width is not None or not _greedy(params),
            "best_of",
            "must be 1 when temperature is 0: greedy completions are all equal",
        )


def _check_logprobs(name: str, number: int | None, most: int) -> None:
    if number is not None and not 0 <= number <= most:
        raise invalid_field(name, f"must be between 0 and {most}, not {number}")


def _check_beams(params: SamplingParams, width: int, vocab_size: int) -> None:
    _require(1 <= width <= MAX_BEAMS, "beam_width", f"must be between 1 and {MAX_BEAMS}, not {width}")
    _require(params.n <= width, "n", f"must be at most beam_width, which is {width}, not {params.n}")
    _require(math.isfinite(params.length_penalty), "length_penalty", f"must be finite, not {params.length_penalty}")
    columns = _columns(params, vocab_size)
    refused = [
        p.name for p in PARAMETERS if not p.penalty and columns[p.name] not in (p.neutral, getattr(_DEFAULTS, p.name))
    ]
    refused += [name for name, harmless in NOT_IN_BEAM_SEARCH.items() if getattr(params, name) not in harmless]
    if refused:
        raise invalid_field(refused[0], "has no meaning in a beam search: leave it out, or leave out beam_width")


def _check_candidates(width: int, stops: int, vocab_size: int) -> None:
    """Checks that every step of a beam search has enough candidates that do not end the text."""
    _require(
        stops <= MAX_BEAM_STOPS,
        "stop_token_ids",
        f"and the model's own are {stops} stop tokens, at most {MAX_BEAM_STOPS} are allowed with beam_width",
    )
    _require(
        width + stops <= vocab_size,
        "beam_width",
        f"{width} and {stops} stop tokens exceed the {vocab_size} tokens there are",
    )


def _check_length(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise invalid_field("max_tokens", f"must be at least 1, not {params.max_tokens}")
    if params.min_tokens < 0:
        raise invalid_field("min_tokens", f"must not be negative, as {params.min_tokens} is")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise invalid_field("min_tokens", f"{params.min_tokens} exceeds max_tokens {params.max_tokens}")


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if params.stop == [] and not params.stop_token_ids:
        return  # as most requests
    stops = stop_strings(params)
    _require(len(stops) <= MAX_STOPS, "stop", f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    _require(all(stops), "stop", "has an empty string: leave it out")
    longest = max(map(len, stops), default=0)
    _require(
        longest <= MAX_STOP_LENGTH,
        "stop",
        f"has a string of {longest} characters, at most {MAX_STOP_LENGTH} are allowed",
    )
    tokens = stop_tokens(params)
    _require(
        len(tokens) <= MAX_STOP_TOKENS,
        "stop_token_ids",
        f"has {len(tokens)} tokens, at most {MAX_STOP_TOKENS} are allowed",
    )
    for token in tokens:
        _check_token("stop_token_ids", token, vocab_size)


def _check_edits(params: SamplingParams, vocab_size: int) -> None:
    if not _has_edits(params):
        return
    biases, allowed, words = params.logit_bias or {}, params.allowed_token_ids, params.bad_words or []
    _require(len(biases) <= MAX_BIASES, "logit_bias", f"has {len(biases)} tokens, at most {MAX_BIASES} are allowed")
    for token, bias in biases.items():
        _check_token("logit_bias", token, vocab_size)
        _require(not math.isnan(bias), "logit_bias", f"of token {token} is not a number")
    if allowed is not None:
        _require(len(allowed) > 0, "allowed_token_ids", "is empty: name at least one token, or leave it out")
        _require(
            len(allowed) <= MAX_ALLOWED_TOKENS,
            "allowed_token_ids",
            f"has {len(allowed)} tokens, at most {MAX_ALLOWED_TOKENS} are allowed",
        )
        for token in allowed:
            _check_token("allowed_token_ids", token, vocab_size)
    _require(len(words) <= MAX_BAD_WORDS, "bad_words", f"has {len(words)} texts, at most {MAX_BAD_WORDS} are allowed")
    _require(all(word.strip() for word in words), "bad_words", "has an empty text: leave it out")
    longest = max(map(len, words), default=0)
    _require(
        longest <= MAX_STOP_LENGTH,
        "bad_words",
        f"has a text of {longest} characters, at most {MAX_STOP_LENGTH} are allowed",
    )


def _check_token(field: str, token: int, vocab_size: int) -> None:
    _require(0 <= token < vocab_size, field, f"has token {token}, outside the vocabulary of {vocab_size} tokens")


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def _require(condition: bool, field: str, reason: str) -> None:
    """Refuses an invalid field. Checks that every request passes are written out: they pay for no message."""
    if not condition:
        raise invalid_field(field, reason)
