"""The messages that dispatch an encoded request: one to its detokenizer, one to the work queue."""

import hashlib
import math

import msgspec

from pagewire.services.tokenizer.request_encoder import EncodedRequest
from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.shared import subjects
from pagewire.shared.bus import Headers
from pagewire.shared.messages import pack
from pagewire.shared.messages.open import OpenStream
from pagewire.shared.messages.work import WorkItem

PROMPT_TAIL = 16
"""Ids of each prompt that the detokenizer gets: the first text behind a prompt can depend on a few of them."""
SECRET_BYTES = 16
"""Bytes of the secret at the end of the subjects that cancel and resume a stream."""


class RequestMessages(msgspec.Struct, frozen=True):
    """The two messages of a request, and the headers of both."""

    opening: OpenStream
    """Opens the client's stream."""
    work: WorkItem
    """The work for a scheduler, still without the detokenizer that has opened the stream."""
    headers: Headers
    """Trace context."""


def request_messages(encoded: EncodedRequest, now: float, seconds_left: float, headers: Headers) -> RequestMessages:
    """Returns the messages of a request whose deadline is in `seconds_left` seconds. `now` is the broker's time."""
    deadline = now + seconds_left
    opening = open_stream(encoded, deadline, math.ceil(seconds_left * 1000))
    return RequestMessages(opening, work_item(encoded, deadline), headers)


def secret_of(request_id: str, digest: bytes) -> bytes:
    """Returns the secret of a request's stream, which is the same whenever and wherever it is opened.

    While detokenizers take over from each other, two may have a stream of a request that its client has sent again:
    each takes the subjects that the other one has told. Whoever can compute the secret can also join the stream, by
    sending the request itself.

    >>> secret_of("r1", b"digest").hex()
    'f685941dc693195115b6043759660c0a'
    """
    return hashlib.sha256(b"stream\0" + request_id.encode() + b"\0" + digest).digest()[:SECRET_BYTES]


def open_stream(encoded: EncodedRequest, deadline: float, timeout_ms: int) -> OpenStream:
    """Returns the message to the detokenizer. `deadline`, by the broker's clock, is in `timeout_ms`."""
    checked, request = encoded.checked, encoded.checked.request
    params = request.sampling
    tail = 0 if params.prompt_logprobs is not None or request.return_token_ids else -PROMPT_TAIL
    sequences = sampling_checks.num_sequences(params)
    ranks = sequences > params.n
    request_id = subjects.owned(checked.tenant, checked.request_id)
    return OpenStream(
        request_id=request_id,
        digest=encoded.digest,
        reply=checked.reply,
        encoding=checked.encoding,
        stream=request.stream,
        prompts=tuple(pack(ids[tail:]) for ids in encoded.prompts),
        prompt_lengths=pack(map(len, encoded.prompts)),
        n=sequences,
        stop=sampling_checks.stop_strings(params),
        stop_token_ids=sampling_checks.stop_tokens(params),
        include_stop=params.include_stop_str_in_output,
        skip_special=encoded.skip_special,
        min_tokens=params.min_tokens,
        timeout_ms=timeout_ms,
        fresh=checked.fresh,
        batch_inbox=checked.batch_inbox,
        deadline=deadline,
        secret=secret_of(request_id, encoded.digest),
        logprobs=params.logprobs is not None or ranks,
        prompt_logprobs=params.prompt_logprobs is not None,
        chat_format=encoded.chat_format,
        best=params.n if ranks else 0,
        hides_logprobs=params.logprobs is None and ranks,
        return_token_ids=request.return_token_ids,
        return_token_origins=request.return_token_origins,
        adapter="" if checked.adapter is None else checked.adapter.name,
    )


def work_item(encoded: EncodedRequest, deadline: float) -> WorkItem:
    """Returns the message to the scheduler. The dispatcher fills in the detokenizer that has opened the stream."""
    checked, request = encoded.checked, encoded.checked.request
    adapter = checked.adapter.digest if checked.adapter is not None else ""
    return WorkItem(
        request_id=subjects.owned(checked.tenant, checked.request_id),
        detokenizer="",
        prompts=tuple(map(pack, encoded.prompts)),
        n=sampling_checks.num_sequences(request.sampling),
        sampling=encoded.sampling,
        priority=request.priority,
        deadline=deadline,
        user=subjects.owned(checked.tenant, request.user),
        cache_salt=subjects.salted(adapter, subjects.owned(checked.tenant, request.cache_salt)),
        adapter=adapter,
    )
