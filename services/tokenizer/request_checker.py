"""The first stage of a request: its bytes become a request whose every field is valid."""

import time

import msgspec

from pagewire.services.tokenizer.adapters import ServedAdapter
from pagewire.services.tokenizer.chat.tool_use import check_tools, with_forced_call
from pagewire.services.tokenizer.served_model import Model
from pagewire.services.tokenizer.validation.request_checks import Prompts, validate
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.client_protocol.client_requests import decode_request, encoding_of
from pagewire.shared.errors import DeadlineExceeded, ModelNotFound
from pagewire.shared.messages.client import GenerateRequest
from pagewire.shared.messages.client_headers import BATCH_INBOX, FRESH
from pagewire.shared.messages.open import Encoding

TOO_LATE = "timeout_ms passed before the request was tokenized: allow more time"


class CheckedRequest(msgspec.Struct, frozen=True):
    """A request whose fields are valid, and its client. Only the number of its tokens is still to be checked."""

    request: GenerateRequest
    """The request, with the model's sampling defaults, and with a grammar if its answer must call tools."""
    prompts: Prompts
    request_id: str
    """Id of the client's choice, or one that was drawn for the message."""
    tenant: str
    """Tenant that the client belongs to; empty: none."""
    reply: str
    """The client's inbox."""
    encoding: Encoding
    """Encoding of the request, and so of the answer."""
    fresh: bool
    """Whether the id was drawn for this very message."""
    batch_inbox: str
    """Inbox where the client's connection takes deltas of several streams; empty: there is none."""
    expires: float
    """Deadline, in monotonic seconds."""
    adapter: ServedAdapter | None = None
    """Adapter that the client has asked for; it stays the same when another one gets its name."""

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline, more than 0.

        Raises:
            DeadlineExceeded: it has passed.
        """
        left = self.expires - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(TOO_LATE)
        return left


def check_request(message: Message, drawn_id: str, arrived: float, model: Model, max_logprobs: int) -> CheckedRequest:
    """Returns the request of a message that arrived at a monotonic time. It has `drawn_id` if it brings no id.

    `max_logprobs` is the deployment's limit of log-probabilities per token.

    Raises:
        InvalidRequest: the message is unreadable or a field is invalid; the error names it.
        ModelNotFound: its adapter was removed after the request had come.
    """
    headers, encoding = message.headers, encoding_of(message.headers)
    request = decode_request(message.data, GenerateRequest, encoding)
    request.sampling = model.generation.complete(request.sampling, message.data, encoding)
    check_tools(request, model.formats)
    request.sampling = with_forced_call(request)
    prompts = validate(request, model.vocab_size, max_logprobs)
    tenant, batch_inbox = subjects.tenant_of(message.subject), headers.get(BATCH_INBOX, "")
    name = subjects.model_of(message.subject)
    adapter = model.adapters.find(name)
    if adapter is None and name not in model.tokens:  # never the text of the base model instead
        raise ModelNotFound(f"no adapter {name} is served any more: list the models")
    return CheckedRequest(
        request,
        prompts,
        request_id=request.request_id or drawn_id,
        tenant=tenant,
        reply=message.reply,
        encoding=encoding,
        fresh=not request.request_id or FRESH in headers,
        batch_inbox=batch_inbox if subjects.owner_of(batch_inbox) == tenant else "",
        expires=arrived + request.timeout_ms / 1000,
        adapter=adapter,
    )
