"""Rebuilds an ended stream from its record: the inverse of `Stream.record`."""

from pagewire.services.detokenizer.state.completion import Completion
from pagewire.services.detokenizer.state.outcome import Times
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared.errors import REQUEST_ERRORS, Internal
from pagewire.shared.messages import unpack
from pagewire.shared.messages.done import Done


def restore(record: Done) -> Stream:
    """Returns the ended stream that a record describes."""
    return Stream(
        request_id=record.request_id,
        digest=record.digest,
        completions=[
            Completion(
                unpack(choice.tokens),
                list(choice.texts),
                choice.finish_reason,
                choice.stop_reason,
                None if choice.logprobs is None else list(choice.logprobs),
                choice.score,
            )
            for choice in record.choices
        ],
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        state=StreamState.ENDED,
        error=REQUEST_ERRORS.get(record.error, Internal)(record.message) if record.error else None,
        secret=record.secret,
        prompts=record.prompts,
        restored_prompt_logprobs=record.prompt_logprobs,
        times=Times(*record.times),
        chat_format=record.chat_format,
    )
