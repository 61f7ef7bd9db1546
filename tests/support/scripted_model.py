"""A model that plays a script: its chat template chooses the line, its weights write it.

The template ends a prompt with the token of a line, and the weights, which see nothing but the last token, answer with
the line and end the turn. A grammar that forbids the line is followed in few characters.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.tokenizers import tokenizer

COMMAND = "echo $((6 * 7))"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "Bash": {"command": COMMAND, "description": "Multiplies six by seven"},
    "get_weather": {"city": "Paris"},
    "City": {"name": "Paris", "inhabitants": 2},
}
"""Arguments of a call by the name of the tool: agents' tools for commands, and those in the SDKs' tests."""
RESULT = "42"
"""Part of each tool's result."""
COMPUTED, RECALLED, FORGOTTEN, GREETING = "The result is 42.", "The result was 42.", "I know no result.", "Hello there."
COMPUTE, RECALL, DESCRIBE = "COMPUTE", "RECALL", "DESCRIBE"
"""Words of a user: the model calls a tool, tells the result of an earlier call, or describes a city in JSON."""
LINES = {
    "computed": COMPUTED,
    "recalled": RECALLED,
    "forgotten": FORGOTTEN,
    "greeting": GREETING,
    "form": json.dumps(ARGUMENTS["City"]),
    **{
        name: f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in ARGUMENTS.items()
    },
}
"""Text of a line by its name. A call ends with a line break: llguidance takes no token from < to > as text."""
TEMPLATE = (
    "{% set known = " + json.dumps(list(ARGUMENTS)) + " %}"
    "{% set now = namespace(line='greeting', computing=false, result=false, tool='') %}"
    "{% for tool in tools or [] %}"
    "{% if tool.function.name in known %}{% set now.tool = tool.function.name %}{% endif %}"
    "tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{% set text = message.content or '' %}{{ message.role }}: {{ text }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}\n"
    "{% if message.role == 'user' and '" + COMPUTE + "' in text %}{% set now.computing = true %}"
    "{% set now.line = now.tool or 'forgotten' %}"
    "{% elif message.role == 'user' and '" + DESCRIBE + "' in text %}{% set now.computing = false %}"
    "{% set now.line = now.tool if now.tool == 'City' else 'form' %}"
    "{% elif message.role == 'user' and '" + RECALL + "' in text %}{% set now.computing = false %}"
    "{% set now.line = 'recalled' if now.result else 'forgotten' %}"
    "{% elif message.role == 'tool' %}{% set now.result = '" + RESULT + "' in text %}"
    "{% if now.computing %}{% set now.line = 'computed' if now.result else 'forgotten' %}{% endif %}{% endif %}"
    "{% endfor %}assistant: <|{{ now.line }}|>"
)
"""Walks through the messages for the line that comes next. Shows tools and calls as Hermes does."""

WIDTH, CONTEXT = 64, 65_536
"""Width of the model, which has a direction for each line, and its context."""
LOUD = 1_000.0
"""Weight of a line's token: above every other."""
PREFERENCES = {'"': 60.0, "}": 50.0, "]": 50.0, ",": 40.0, "1": 30.0}
"""Logits where a grammar forbids the line: the end of a string comes first, then the end of a value, then the shortest
token, and last white space, which never ends."""


@functools.cache
def _words() -> Tokenizer:
    words = Tokenizer.from_str(tokenizer("gpt2").to_str())
    words.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in LINES])
    words.add_tokens([AddedToken(text, normalized=False) for text in LINES.values()])
    return words


def write_scripted_model(folder: Path) -> Path:
    """Writes the model to a folder in Hugging Face format, and returns the folder."""
    words = _words()
    vocabulary = words.get_vocab()
    end = vocabulary["<|endoftext|>"]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=end,
        bos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float(name.endswith("norm.weight")))
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, 0] = 1  # what all tokens have in common
        head[:, 0] = torch.tensor([_preference(text) for text, _ in sorted(vocabulary.items(), key=_by_id)])
        head[end, 0] = LOUD / 10
        for direction, (name, text) in enumerate(LINES.items(), start=1):
            cue, line = vocabulary[f"<|{name}|>"], vocabulary[text]
            embedding[cue, direction] = 3
            head[line, direction] = LOUD
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|endoftext|>", chat_template=TEMPLATE, model_max_length=CONTEXT
    ).save_pretrained(folder)
    return folder


def _by_id(entry: tuple[str, int]) -> int:
    return entry[1]


def _preference(text: str) -> float:
    readable = re.match(r"[!-~]", text)  # else white space or a part of a character
    return PREFERENCES.get(text, -10.0 * len(text) if readable else -2_000.0)
