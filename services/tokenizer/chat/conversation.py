"""Checks the chat fields of a request, and makes a conversation of them. Pure."""

from collections.abc import Sequence

import msgspec

from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.shared.client_protocol.client_requests import check_free_form
from pagewire.shared.errors import invalid_field
from pagewire.shared.messages.client import ChatMessage, GenerateRequest

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
"""Variables that `chat_template_kwargs` cannot set: the request has fields for them, or clients cannot set them."""


def conversation_of(request: GenerateRequest, messages: Sequence[ChatMessage]) -> Conversation:
    """Returns the conversation of a request with `messages`.

    Raises:
        InvalidRequest: a field is invalid; the message names the field and its valid values.
    """
    if not messages:
        raise invalid_field("messages", "is empty: give at least one")
    for message in messages:
        check_free_form("messages", message.tool_calls, "[].tool_calls")
    variables = request.chat_template_kwargs or {}
    check_free_form("chat_template_kwargs", variables)
    if reserved := RESERVED & variables.keys():
        raise invalid_field("chat_template_kwargs", f"cannot have {', '.join(sorted(reserved))}")
    generation_prompt = request.add_generation_prompt
    if request.continue_final_message and generation_prompt:
        raise invalid_field("continue_final_message", "and add_generation_prompt exclude each other: leave out one")
    return Conversation(
        messages=msgspec.to_builtins(messages),
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=variables,
        tools=request.tools or None,
    )
