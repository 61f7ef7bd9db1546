"""Turns a conversation into a prompt, with the model's own chat template."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage

_RENDERING_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template, which is a program, may raise for messages that it was not written for."""


def render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage]) -> str:
    """Returns the text that the model continues as the assistant, special tokens spelled out.

    Raises:
        InvalidRequest: the model has no template, or the template does not take these messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest("this model has no chat template: send a prompt instead of messages")
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except _RENDERING_ERRORS as error:
        reason = error.message if isinstance(error, TemplateError) and error.message else "it is written for others"
        raise InvalidRequest(f"the model's chat template does not take these messages: {reason}") from error
