"""The last frame of a stream, and log-probabilities as clients get them. Pure."""

from collections.abc import Sequence

from pagewire.services.detokenizer.state.stream import Stream
from pagewire.services.detokenizer.text.vocabulary import Spell, Spelling
from pagewire.shared.chat.reasoning_length import reasoning_tokens
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.messages import client, unpack
from pagewire.shared.messages.client import (
    Choice,
    Final,
    FinalChoice,
    Logprob,
    Result,
    Usage,
)
from pagewire.shared.messages.client_headers import REFUSED
from pagewire.shared.messages.done import ReportedLogprobs


def spelled(reported: ReportedLogprobs, spell: Spell) -> client.TokenLogprobs:
    """Returns the log-probabilities of one token as a client gets them."""
    ids, values = memoryview(reported.ids).cast("I"), memoryview(reported.values).cast("f")
    logprobs = {ids[0]: _logprob(values[0], reported.rank, spell(ids[0]))}
    for rank, token in enumerate(ids[1:], 1):
        if token not in logprobs:
            logprobs[token] = _logprob(values[rank], rank, spell(token))
    return logprobs


def _logprob(value: float, rank: int, spelling: Spelling) -> Logprob:
    logprob = Logprob(value, rank, spelling.text)
    if spelling.broken:
        logprob.bytes = list(spelling.broken)
    return logprob


def last_frame(stream: Stream, encoding: int, spell: Spell, *, streaming: bool) -> tuple[bytes, dict[str, str] | None]:
    """Returns the bytes and the headers of the last frame of a stream, or of the only reply without one."""
    if stream.error is not None:
        frame = error_frame(stream.error, stream.public_id, stream.tokens)
        refused = {REFUSED: "1"} if stream.refused else {}
        return encode_frame(frame, encoding), error_headers(stream.error) | refused
    returned, metrics = stream.returned, stream.times.metrics()
    metrics.speculative_decoding = stream.drafts.metrics()
    tokens = sum(len(completion.tokens) for completion in returned)
    reasoning = sum(reasoning_tokens(completion.texts, stream.chat_format) for completion in returned)
    usage = Usage(stream.prompt_tokens, tokens, stream.cached_tokens, reasoning)
    if streaming:
        ends = [FinalChoice(i, end.finish or "cancelled", end.stop_reason) for i, end in enumerate(returned)]
        return encode_frame(Final(stream.public_id, ends, usage, *_prompts(stream, spell), metrics), encoding), None
    choices = [
        Choice(
            index=index,
            text="".join(completion.texts),
            token_ids=completion.tokens,
            finish_reason=completion.finish or "cancelled",
            stop_reason=completion.stop_reason,
            logprobs=None
            if completion.logprobs is None or stream.hides_logprobs
            else [spelled(reported, spell) for reported in completion.logprobs],
            score=completion.score,
        )
        for index, completion in enumerate(returned)
    ]
    form = stream.chat_format
    result = Result(stream.public_id, choices, usage, *_prompts(stream, spell), metrics=metrics, chat_format=form)
    return encode_frame(result, encoding), None


def _prompts(stream: Stream, spell: Spell) -> tuple[list[list[int]] | None, list[client.PromptLogprobs] | None]:
    """Returns ids and log-probabilities of the prompts, if the request asks for them."""
    if not stream.prompts:
        return None, None
    logprobs = [spelled_prompt(prompt, spell) for prompt in stream.prompt_logprobs]
    return [unpack(prompt) for prompt in stream.prompts], logprobs or None


def prompt_before(stream: Stream, index: int) -> Sequence[ReportedLogprobs | None]:
    """Returns the log-probabilities of the prompt that come with a completion: the first one of the prompt."""
    if not stream.prompts:
        return ()
    prompt, completion = divmod(index, len(stream.completions) // len(stream.prompts))
    return () if completion or not stream.prompt_logprobs else stream.prompt_logprobs[prompt]


def spelled_prompt(prompt: Sequence[ReportedLogprobs | None], spell: Spell) -> client.PromptLogprobs:
    """Returns the log-probabilities of a prompt as a client gets them."""
    return [None if reported is None else spelled(reported, spell) for reported in prompt]
