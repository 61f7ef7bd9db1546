"""An ended stream from its record."""

from pagewire.services.detokenizer.state.completion import Completion
from pagewire.services.detokenizer.state.outcome import Times
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.shared.errors import REQUEST_ERRORS, Internal
from pagewire.shared.messages import unpack
from pagewire.shared.messages.done import Done


def restore(done: Done) -> Stream:
    """Returns the ended stream of a record."""
    return Stream(
        request_id=done.request_id,
        digest=done.digest,
        completions=[
            Completion(
                unpack(choice.tokens),
                list(choice.texts),
                choice.finish_reason,
                choice.stop_reason,
                None if choice.logprobs is None else list(choice.logprobs),
                choice.score,
            )
            for choice in done.choices
        ],
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        state=StreamState.ENDED,
        error=REQUEST_ERRORS.get(done.error, Internal)(done.message) if done.error else None,
        secret=done.secret,
        prompts=done.prompts,
        restored_prompt_logprobs=done.prompt_logprobs,
        times=Times(*done.times),
        chat_format=done.chat_format,
    )
