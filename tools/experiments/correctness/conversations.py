"""Renders forty conversations of four APIs with each chat template of a folder, and compares them with `transformers`.

A line per template: how many prompts are equal to those of `transformers.apply_chat_template`, how many conversations
were mended because that refuses them or leaves texts out, and how many are refused, with the reason.
"""

import argparse
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pagewire.bench._common.output import markdown
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.service import APIS
from pagewire.services.tokenizer.chat.chat_template import ChatTemplate, Conversation
from pagewire.services.tokenizer.chat.conversation import conversation_of
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.format_recognition import tool_format
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages.client import GenerateRequest
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tools.experiments.correctness.inputs.api_conversations import CONVERSATIONS, NATS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
"""Special tokens that the templates get."""


@dataclass(slots=True)
class Outcome:
    """The prompts of one template."""

    equal: list[str] = field(default_factory=list)
    """Titles of the conversations whose prompts are those of `transformers`."""
    mended: list[str] = field(default_factory=list)
    """Titles of the conversations that `transformers` refuses, or of which it leaves texts out."""
    changed: list[str] = field(default_factory=list)
    """Titles of the conversations that `transformers` renders whole, but otherwise: faults."""
    lossy: dict[str, list[str]] = field(default_factory=dict)
    """Texts that mended prompts leave out, by title: faults."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons, by title."""


def main(arguments: list[str]) -> int:
    """Prints the table; returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments conversations", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of templates, NAME.jinja")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.glob("*.jinja"))
    if not paths:
        raise ConfigurationError(f"{options.folder} has no templates: give a folder with files NAME.jinja")
    outcomes = {path.stem: outcome_of(path.read_text()) for path in paths}
    print(*table(outcomes), sep="\n")
    for name, outcome in outcomes.items():
        for title, reason in outcome.refused.items():
            print(f"{name}: {title}: refused: {reason}")
        for title in outcome.changed:
            print(f"{name}: {title}: not as transformers renders it")
        for title, texts in outcome.lossy.items():
            print(f"{name}: {title}: without {', '.join(texts)}")
    return int(any(outcome.changed or outcome.lossy for outcome in outcomes.values()))


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Returns the lines of the table."""
    rows = (
        f"{name} | {len(outcome.equal)} | {len(outcome.mended)} | {len(outcome.refused)}"
        for name, outcome in outcomes.items()
    )
    return markdown("template | as `transformers` | mended | refused", rows)


def outcome_of(source: str) -> Outcome:
    """Returns what becomes of the conversations with a template."""
    template, outcome = ChatTemplate(chat_environment(), source, SPECIAL), Outcome()
    template.rules = template.probe()
    as_text = not (template.rules.shows_tools and tool_format(source))
    for api, name, conversation in conversations():
        title, texts = f"{api}, {name}", _texts(conversation)
        conversation.tools_as_text = as_text
        reference = _reference(template, source, conversation)
        takes = reference is not None and not _missing(texts, reference) and not (as_text and conversation.tools)
        try:
            prompt = template.render(conversation)
        except Exception as error:  # noqa: BLE001  # templates may raise any exception
            message = error.message if isinstance(error, TemplateError) else repr(error)
            outcome.refused[title] = f"messages[{template.refused_message(conversation)}]: {message}"
            continue
        if prompt == reference:
            outcome.equal.append(title)
        elif takes:
            outcome.changed.append(title)
        else:
            outcome.mended.append(title)
            if missing := _missing(texts, prompt):
                outcome.lossy[title] = missing
    return outcome


def conversations() -> Iterator[tuple[str, str, Conversation]]:
    """Yields the API, the title and the conversation of each request."""
    for api, title, body in CONVERSATIONS:
        if api == NATS:
            request = msgspec.convert(body, GenerateRequest)
        else:
            call = APIS[api].read(json.dumps({"model": "m", **body}).encode(), UnknownFields(strict=True))
            names = ("messages", "tools", "continue_final_message", "add_generation_prompt", "chat_template_kwargs")
            request = GenerateRequest(**{name: call.arguments[name] for name in names if name in call.arguments})
        assert request.messages is not None
        yield api, title, conversation_of(request, request.messages)


def _reference(template: ChatTemplate, source: str, conversation: Conversation) -> str | None:
    """Returns the prompt of `transformers`, which gets roles, contents and arguments in the form that its documents
    describe; None: the template refuses it."""
    try:
        messages = [template.in_form(_parsed(message)) for message in conversation.messages]
        prompt = _tokenizer().apply_chat_template(
            messages,
            tools=conversation.tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
    except Exception:  # noqa: BLE001  # templates may raise any exception
        return None
    return str(prompt)


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have arguments as objects."""
    message = copy.deepcopy(message)
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(BUNDLED).to_transformers()
    for name, token in SPECIAL.items():
        setattr(tokenizer, name, token)
    return tokenizer


def _texts(conversation: Conversation) -> list[str]:
    """Returns the words that a prompt must have: texts, places of calls, and names of tools. A template decides by
    itself whether it shows reasoning, and texts beside calls."""
    texts = [tool["function"]["name"] for tool in conversation.tools or ()]
    for message in conversation.messages:
        calls = message.get("tool_calls") or ()
        texts += [json.loads(call["function"]["arguments"])["place"] for call in calls]
        content = message.get("content") if not calls else None
        texts += [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    return texts


def _missing(texts: Sequence[str], prompt: str) -> list[str]:
    return [text for text in texts if text not in prompt]
