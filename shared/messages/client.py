"""The public messages: requests of clients and their replies, as maps in JSON or MessagePack."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pagewire.shared.errors import ContextLengths
from pagewire.shared.messages.request_metrics import Metrics


class StructuredOutputsParams(
    msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True
):
    """The form that the text must have: exactly one of the first six fields. Names and meaning are vLLM's."""

    json: str | dict[str, Any] | None = None
    """A JSON schema that the text fulfils."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: list[str] | None = None
    """The texts to choose from."""
    grammar: str | None = None
    """A grammar in llguidance's form of Lark, or in GBNF."""
    json_object: bool | None = None
    """Whether the text is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which each of the `triggers` begins one of the `structures`: its `begin`, a value of its JSON
    `schema`, and its `end`."""
    disable_any_whitespace: bool = False
    """Whether JSON has no whitespace between its tokens."""
    disable_additional_properties: bool = False
    """Whether objects have no properties that the schema does not name, unless it allows them by itself."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace between the tokens of JSON; None: at most 16 characters."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are sampled and when generation stops. Names and defaults are vLLM's.

    A field that a request leaves out has the value of the model's generation_config, or else the default here; a beam
    search has the default.
    """

    n: int = 1
    """Completions per prompt."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens; None: the model's own maximum, or else up to the context length."""
    min_tokens: int = 0
    """Number of generated tokens before which neither EOS nor a stop ends the text."""
    temperature: float = 1.0
    """Scale of randomness; 0: greedy."""
    top_p: float = 1.0
    """Samples from the smallest set of likeliest tokens with this probability mass; 1: all tokens."""
    top_k: int = 0
    """Samples from the k likeliest tokens; 0 or -1: all tokens."""
    min_p: float = 0.0
    """Samples from tokens with at least this probability, relative to the likeliest token's."""
    seed: int | None = None
    """Seed that makes sampling repeatable; None: it follows from the request and its id."""
    stop: str | list[str] = []
    """Strings that end the text."""
    stop_token_ids: list[int] = []
    """Tokens that end the text; they are part of the ids, but not of the text."""
    ignore_eos: bool = False
    """Whether generation continues after the model's EOS token."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the stop token's text, is part of the text."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, per occurrence."""
    repetition_penalty: float = 1.0
    """Penalizes tokens of prompt and output: their positive logits are divided by it, negative ones multiplied."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits, by token id."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated."""
    bad_words: list[str] | None = None
    """Texts that may not be generated."""
    logprobs: int | None = None
    """Number of the likeliest tokens whose log-probabilities are reported beside that of each generated token; -1: all
    tokens, if the server allows that."""
    prompt_logprobs: int | None = None
    """Number as in `logprobs`, for each token of the prompt but the first."""
    structured_outputs: StructuredOutputsParams | None = None
    """Form that the text must have."""
    beam_width: int | None = None
    """Beam search with this many beams."""
    length_penalty: float = 1.0
    """Exponent of the length by which a beam's score is divided."""
    best_of: int | None = None
    """Completions to generate per prompt, of which the `n` with the highest cumulative log-probability are returned;
    None: as many as are returned. Not with a stream."""


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A text that is a part of a message."""

    text: str


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation. Fields that are not here are ignored: clients send answers back as they came.

    Raises:
        ValueError: it says nothing at all.
    """

    role: str
    """Role in the model's chat template: system, developer, user, assistant, tool."""
    content: str | list[TextPart] | None = None
    """Text of the turn; None beside tool calls, or reasoning, without a text."""
    name: str | None = None
    """Name of the speaker, or of the tool."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls that an assistant has made, in OpenAI's shape."""
    tool_call_id: str | None = None
    """Call whose result a tool message holds."""
    reasoning_content: str | None = None
    """Reasoning of an assistant."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    thinking: str | None = None
    """Another name of `reasoning_content`."""

    def __post_init__(self) -> None:
        texts = (self.content, self.tool_calls, self.reasoning_content, self.reasoning, self.thinking)
        if all(value is None for value in texts):
            raise ValueError("the message has no content: give a text, or a list of text parts")


class FunctionName(msgspec.Struct):
    """The name of a tool."""

    name: str


class ToolChoice(msgspec.Struct):
    """The one tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A request to `pagewire.v1.generate.<model>`."""

    prompt: str | Sequence[int | str | Sequence[int]] | None = None
    """Text, token ids, or several of either, not mixed. Exactly one of `prompt` and `messages` must be given."""
    messages: list[ChatMessage] | None = None
    """Conversation, which the model's chat template turns into a prompt."""
    add_generation_prompt: bool | None = None
    """Whether the template begins the assistant's turn; None: unless the last message is continued."""
    continue_final_message: bool = False
    """Whether the model continues the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, such as `enable_thinking`."""
    stream: bool = False
    """Whether to send a frame per token instead of one result."""
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    """How tokens are sampled."""
    request_id: str | None = None
    """Id chosen by the client: the same id with the same body is the same request."""
    priority: int = 0
    """Requests with lower values run earlier."""
    user: str = ""
    """User of the request: users of the same priority get equal shares."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes, so that timing reveals no other user's prompts."""
    timeout_ms: int = 60_000
    """Deadline, counted from arrival."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens at the end of a prompt that count, the others are dropped; -1: as many as leave room for
    `max_tokens` in the context."""
    add_special_tokens: bool | None = None
    """Whether a text gets the special tokens that the model wants around a prompt; None: a prompt does, and a
    conversation, whose template spells them out, does not."""
    return_token_ids: bool = False
    """Whether the ids of the prompts are part of the answer; those of the completions always are."""
    return_token_origins: bool = False
    """Whether each frame of a stream says if its token was sampled, drafted, or forced by a grammar."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's shape; with `messages` only."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether the model may call tools, must call some, or must call a named one; None: it may, if there are any."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    clamp_max_tokens: bool = False
    """Whether a `max_tokens` beyond the context becomes what the context leaves, instead of an error."""


class ChatFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How `pagewire.shared.chat.parser` finds the parts of a message in the text of an answer."""

    tool_calls: str = ""
    """Format of tool calls in the text; empty: none are looked for."""
    reasoning: str = ""
    """Format of reasoning at the beginning of the text; empty: none is looked for."""
    opened: bool = False
    """Whether the prompt ends with the tag that begins reasoning."""
    single: bool = False
    """Whether only the first call counts."""
    tool: str = ""
    """Name of the one tool that must be called."""
    texts: dict[str, list[str]] = {}
    """Names of the arguments that are texts, by tool, for formats that do not show it."""
    short_ids: bool = False
    """Whether the ids of calls have nine letters and digits, as the model's chat template wants them."""


class Usage(msgspec.Struct):
    """Number of tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Completion tokens of the reasoning before the answers, its tags included."""


class Logprob(msgspec.Struct):
    """The log-probability of one token at one position."""

    logprob: float
    """Natural logarithm, or logit as `--logprobs-mode` says; -9999 stands for minus infinity."""
    rank: int | None = None
    """Rank of the token at its position; 1: the likeliest."""
    decoded_token: str | None = None
    """Text of the token alone."""
    bytes: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Bytes of a token with a part of a character, which its text cannot show."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at the position of one token, by id: its own first, then the likeliest ones."""
PromptLogprobs = list[TokenLogprobs | None]
"""Log-probabilities of each token of a prompt; None for the first one, which nothing predicts."""


class Choice(msgspec.Struct):
    """One completion of a result."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_reason: str | int | None = None
    """Stop string, or id of the stop token, that ended the text."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each token; None if the request does not ask for them."""
    score: float | None = None
    """Cumulative log-probability of a completion that a beam search has found."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the tokens; None without `logprobs` or beam search."""
        if self.score is not None or self.logprobs is None:
            return self.score
        return sum(logprobs[token].logprob for logprobs, token in zip(self.logprobs, self.token_ids, strict=True))


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
    """Number of tokens of all prompts."""
    chat_format: ChatFormat | None = None
    """How to find tool calls and reasoning in the texts; None: there are none."""
    prompt_token_ids: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    """Token ids of each prompt, only if the request asks for `return_token_ids`."""


class Queued(msgspec.Struct, tag="queued", tag_field="type"):
    """Keep-alive frame before the first token."""

    request_id: str


TokenOrigin = Literal["sampled", "drafted", "forced"]
"""How a token came: sampled, drafted and verified, or the only one that a grammar allows."""


class Delta(msgspec.Struct, tag="delta", tag_field="type"):
    """One token of one completion."""

    index: int
    start: int
    """Position of the token in its completion."""
    text: str
    """Text that the token adds; empty while a character or a possible stop string is incomplete."""
    token_ids: list[int]
    """Id of the token."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the token; None if the request does not ask for them."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """Log-probabilities of the prompt, if the request asks for them: with the first token of its first completion."""
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the prompts that were in the prefix cache, with the first token of a completion; unset: none."""
    origin: TokenOrigin | msgspec.UnsetType = msgspec.UNSET
    """How the token came, if the request asks for `return_token_origins`; unset: its step was not read here, or several
    tokens in one delta came in different ways."""


class DeltaBatch(msgspec.Struct, tag="batch", tag_field="type"):
    """Deltas of several streams of one connection in one message."""

    replies: list[str]
    """Reply subject of each delta's request."""
    deltas: list[Delta]
    """Deltas of all streams; the deltas of one stream are in order."""


class Final(msgspec.Struct, tag="final", tag_field="type"):
    """Last frame of a stream that did not fail."""

    request_id: str
    choices: list[FinalChoice]
    usage: Usage
    prompt_token_ids: list[list[int]] | None = None
    """Token ids of each prompt, if the request asks for `prompt_logprobs` or `return_token_ids`."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    metrics: Metrics | None = None


class Result(msgspec.Struct, tag="result", tag_field="type"):
    """The only reply to a request without `stream`."""

    request_id: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[list[int]] | None = None
    """Token ids of each prompt, if the request asks for `prompt_logprobs` or `return_token_ids`."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    chat_format: ChatFormat | None = None
    """How to find tool calls and reasoning in the texts; None: there are none."""
    metrics: Metrics | None = None


class ErrorFrame(msgspec.Struct, tag="error", tag_field="type", omit_defaults=True):
    """Last frame of a request that failed."""

    code: int
    """HTTP status code of the error."""
    error: str
    """`kind` of the error in `pagewire.shared.errors`."""
    message: str
    retryable: bool
    request_id: str
    tokens_emitted: int
    retry_after_ms: int | None = None
    field: str | None = None
    """Name of the invalid field of the request; None: no single field is to blame."""
    lengths: ContextLengths | None = None
    """Lengths of a request that exceeds the context; None: it is not too long."""


Frame = Accepted | Queued | Delta | Final | Result | ErrorFrame
"""Every message to a reply subject, except for the empty message that closes a stream."""


class ModelInfo(msgspec.Struct):
    """A model in the reply of `pagewire.v1.models`."""

    name: str
    subject: str
    """Subject to send requests for the model to."""
    max_model_len: int
    """Context length in tokens."""
    revision: str
    """Fingerprint of the configuration and of the weight files' names and sizes."""
    root: str = ""
    """The model's own name, if it has several; of an adapter, the hash of its content."""
    parent: str = ""
    """Own name of the model that an adapter changes; empty: it is no adapter."""
    adaptable: bool = False
    """Whether adapters can be loaded for the model."""

    @property
    def own_name(self) -> str:
        """The own name of the model, without aliases and adapters."""
        return self.parent or self.root or self.name


class ModelList(msgspec.Struct):
    """Reply of `pagewire.v1.models`."""

    models: list[ModelInfo]


class CancelReply(msgspec.Struct):
    """Reply of a `cancel` subject."""

    state: Literal["cancelled", "ended", "unknown"]
    """Whether the request was running until now, had ended before, or is unknown."""


class ResumeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to a `resume` subject to repeat the frames from position `start` on."""

    start: int = 0
