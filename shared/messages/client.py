"""The outer edge: what clients send and what they get back, in JSON or MessagePack maps."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

FRESH = "Pagewire-Fresh"
"""Header of a generate request whose id was drawn for it and is sent for the first time: nobody looks for an earlier
request of that id."""
BATCH_INBOX = "Pagewire-Batch-Inbox"
"""Header of a generate request that names another inbox of its connection: deltas may come there as `DeltaBatch`."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """How tokens are chosen and when to stop. Names and defaults are vLLM's.

    A request says with it what every field is. Where a request leaves out fields, or the whole, those that the model's
    generation_config has come from there, and only the others from here.
    """

    n: int = 1
    """Completions per prompt."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: up to the context limit."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor a stop ends the text."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of likeliest tokens whose mass reaches this; 1 is all."""
    top_k: int = 0
    """The k likeliest tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Tokens at least this likely, relative to the likeliest."""
    seed: int | None = None
    """Makes sampling repeatable; drawn by the tokenizer when absent."""
    stop: str | list[str] = []
    """Strings that end the text."""
    stop_token_ids: list[int] = []
    """Tokens that end the text; kept in the ids, left out of the text."""
    ignore_eos: bool = False
    """The model's own end does not end the text."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the stop token's text, stays in the text."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logits of tokens that were generated."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and output."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits, by token id."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated."""
    bad_words: list[str] | None = None
    """Texts that may not be generated."""
    logprobs: int | None = None
    """Log-probabilities per generated token."""
    prompt_logprobs: int | None = None
    """Log-probabilities per prompt token."""
    structured_outputs: dict[str, object] | None = None
    """A grammar that the text must follow."""
    beam_width: int | None = None
    """Beam search with this many beams."""
    length_penalty: float = 1.0
    """Exponent of the length in a beam's score."""


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A part of what is said."""

    text: str


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation. Fields that are not here are ignored: clients send answers back as they came.

    Raises:
        ValueError: it says nothing at all.
    """

    role: str
    """Who speaks, as the model's chat template knows it: system, developer, user, assistant, tool."""
    content: str | list[TextPart] | None = None
    """What is said; None beside tool calls, or reasoning, that stand alone."""
    name: str | None = None
    """Of the speaker, or of the tool."""
    tool_calls: list[dict[str, Any]] | None = None
    """What an assistant has called, in OpenAI's shape."""
    tool_call_id: str | None = None
    """The call that a tool answers."""
    reasoning_content: str | None = None
    """What an assistant has thought; `reasoning` and `thinking` are other names for it."""
    reasoning: str | None = None
    thinking: str | None = None

    def __post_init__(self) -> None:
        says = (self.content, self.tool_calls, self.reasoning_content, self.reasoning, self.thinking)
        if all(value is None for value in says):
            raise ValueError("the message has no content: give a text, or a list of text parts")


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request to `pagewire.v1.generate.<model>`."""

    prompt: str | Sequence[int | str | Sequence[int]] | None = None
    """Text, token ids, or several of either (not mixed); exactly one of `prompt` and `messages` is given."""
    messages: list[ChatMessage] | None = None
    """A conversation, laid out by the model's chat template."""
    add_generation_prompt: bool | None = None
    """Whether the assistant is to speak behind the messages; None: unless the last one is continued."""
    continue_final_message: bool = False
    """The model goes on with the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, such as `enable_thinking`."""
    stream: bool = False
    """Frames as tokens arrive instead of one result."""
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    """How tokens are chosen."""
    request_id: str | None = None
    """The client's own id: the same id with the same body is the same request."""
    priority: int = 0
    """Lower runs earlier."""
    user: str = ""
    """Who asks: users of one priority get fair shares."""
    cache_salt: str = ""
    """Only requests with the same one share cached prefixes, so nobody else can learn from timing what was asked."""
    timeout_ms: int = 60_000
    """Deadline, counted from arrival."""


class Usage(msgspec.Struct):
    """What a request used, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Choice(msgspec.Struct):
    """One completion of a result."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_reason: str | int | None = None
    logprobs: None = None


class FinalChoice(msgspec.Struct):
    """How one completion of a stream ended."""

    index: int
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_reason: str | int | None = None


class Accepted(msgspec.Struct, tag="accepted", tag_field="type"):
    """First frame of a stream."""

    request_id: str
    cancel: str
    """Subject that cancels the request."""
    resume: str
    """Subject that repeats frames."""
    prompt_tokens: int
    """Of all prompts."""


class Queued(msgspec.Struct, tag="queued", tag_field="type"):
    """Keep-alive until the first token."""

    request_id: str


class Delta(msgspec.Struct, tag="delta", tag_field="type"):
    """One token of one completion."""

    index: int
    start: int
    """Position of the token in its completion."""
    text: str
    """May be empty while a character or a stop string is open."""
    token_ids: list[int]
    logprobs: None = None


class DeltaBatch(msgspec.Struct, tag="batch", tag_field="type"):
    """Deltas of several streams to one connection, as one message instead of one each."""

    replies: list[str]
    """The reply subject of each delta's request."""
    deltas: list[Delta]
    """Those of one stream are in order."""


class Final(msgspec.Struct, tag="final", tag_field="type"):
    """Last frame of a stream that did not fail."""

    request_id: str
    choices: list[FinalChoice]
    usage: Usage


class Result(msgspec.Struct, tag="result", tag_field="type"):
    """The one reply to a request without `stream`."""

    request_id: str
    choices: list[Choice]
    usage: Usage


class ErrorFrame(msgspec.Struct, tag="error", tag_field="type", omit_defaults=True):
    """Ends a request that failed."""

    code: int
    error: str
    """Name of the error, as `pagewire.shared.errors` has it."""
    message: str
    retryable: bool
    request_id: str
    tokens_emitted: int
    retry_after_ms: int | None = None


Frame = Accepted | Queued | Delta | Final | Result | ErrorFrame
"""Whatever a reply subject may receive, but for the empty message that closes a stream."""


class ModelInfo(msgspec.Struct):
    """One model in the answer of `pagewire.v1.models`."""

    name: str
    subject: str
    """Where to send requests for it."""
    max_model_len: int
    """Context, in tokens."""
    revision: str
    """Fingerprint of its configuration and weights' names."""


class ModelList(msgspec.Struct):
    """Answer of `pagewire.v1.models`."""

    models: list[ModelInfo]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to `pagewire.v1.tokenize.<model>`."""

    text: str


class TokenizeReply(msgspec.Struct):
    """Answer to a `TokenizeRequest`, and the body of a detokenize request."""

    token_ids: list[int]


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to `pagewire.v1.detokenize.<model>`."""

    token_ids: list[int]


class DetokenizeReply(msgspec.Struct):
    """Answer to a `DetokenizeRequest`."""

    text: str


class CancelReply(msgspec.Struct):
    """Answer of a `cancel` subject to a request."""

    state: Literal["cancelled", "ended", "unknown"]
    """What the request was: running until now, over already, or never heard of."""


class ResumeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to a `resume` subject: repeat the frames from position `start` on."""

    start: int = 0
