"""From a checked request and its token ids to the two messages that hand it over."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pagewire.services.tokenizer import sampling
from pagewire.shared.messages import pack
from pagewire.shared.messages.client import GenerateRequest
from pagewire.shared.messages.open import Encoding, OpenStream
from pagewire.shared.messages.work import Sampling, WorkItem

TAIL = 16
"""Ids of each prompt that the detokenizer gets: the first text behind a prompt can depend on a few of them."""

_canonical = msgspec.msgpack.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and until when the answer is wanted."""

    request_id: str
    reply: str
    """The client's inbox."""
    encoding: Encoding
    deadline: float
    """Unix time in seconds."""
    fresh: bool
    """Whether the id was drawn for this very message."""
    batch_inbox: str
    """The inbox where its connection takes deltas of several streams; empty: there is none."""


def digest_of(request: GenerateRequest) -> bytes:
    """A fingerprint of what is asked for: equal for the same body in either encoding, streamed or not."""
    # Structs leave out defaults by identity, not by value, when they are encoded: dictionaries leave out nothing.
    body = msgspec.structs.asdict(request) | {"sampling": msgspec.structs.asdict(request.sampling)}
    del body["request_id"], body["stream"]
    return hashlib.sha256(_canonical.encode(body)).digest()


def open_stream(
    request: GenerateRequest, caller: Caller, prompts: Sequence[Sequence[int]], digest: bytes, timeout_ms: int
) -> OpenStream:
    """What the detokenizer needs to speak to the client."""
    params = request.sampling
    return OpenStream(
        request_id=caller.request_id,
        digest=digest,
        reply=caller.reply,
        encoding=caller.encoding,
        stream=request.stream,
        prompts=tuple(pack(ids[-TAIL:]) for ids in prompts),
        prompt_lengths=pack(map(len, prompts)),
        n=params.n,
        stop=sampling.stop_strings(params),
        stop_token_ids=sampling.stop_tokens(params),
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        timeout_ms=timeout_ms,
        fresh=caller.fresh,
        batch_inbox=caller.batch_inbox,
    )


def work_item(
    request: GenerateRequest, caller: Caller, prompts: Sequence[Sequence[int]], resolved: Sampling
) -> WorkItem:
    """What the scheduler needs. The detokenizer is filled in once one has opened the stream."""
    return WorkItem(
        request_id=caller.request_id,
        detokenizer="",
        prompts=tuple(map(pack, prompts)),
        n=request.sampling.n,
        sampling=resolved,
        priority=request.priority,
        deadline=caller.deadline,
        user=request.user,
        cache_salt=request.cache_salt,
    )
