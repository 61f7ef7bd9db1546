"""What a request wants to be laid out, checked. Pure."""

from collections.abc import Sequence

import msgspec

from pagewire.services.tokenizer.chat.layout import Conversation
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage, GenerateRequest

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
"""What `chat_template_kwargs` cannot set: the request has fields for it, or it is not the client's to choose."""


def conversation_of(request: GenerateRequest, messages: Sequence[ChatMessage]) -> Conversation:
    """The conversation of a request with `messages`.

    Raises:
        InvalidRequest: names the field and what it may be.
    """
    if not messages:
        raise InvalidRequest("messages is empty: give at least one")
    variables = request.chat_template_kwargs or {}
    if reserved := RESERVED & variables.keys():
        raise InvalidRequest(f"chat_template_kwargs cannot have {', '.join(sorted(reserved))}")
    generation_prompt = request.add_generation_prompt
    if request.continue_final_message and generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other: leave out one")
    return Conversation(
        messages=msgspec.to_builtins(messages),
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=variables,
    )
