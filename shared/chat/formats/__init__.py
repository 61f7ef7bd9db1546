"""The formats in which models write tool calls and reasoning, by the names that vLLM gives to their parsers."""

from collections.abc import Callable, Mapping

from pagewire.shared.chat.formats import (
    forced,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from pagewire.shared.chat.reader import Reader, Steps

Grammar = Callable[[Reader], Steps[None]]
"""Reads the calls and the content of a message."""

REQUIRED = "required"
"""Format of a text that a grammar forces to be calls."""
NAMED = "named"
"""Format of a text that a grammar forces to be the arguments of one tool."""
HARMONY = "harmony"
"""Format of whole messages, with reasoning and calls in them."""
TYPED = frozenset({"glm45", "qwen3_coder"})
"""Formats whose arguments are texts or JSON, which only the schemas of the tools tell apart."""

TOOL_CALLS: Mapping[str, Grammar] = {
    "glm45": glm45.glm45,
    HARMONY: harmony.harmony,
    "hermes": hermes.hermes,
    "kimi_k2": kimi_k2.kimi_k2,
    "llama3_json": llama3_json.llama3_json,
    "mistral": mistral.mistral,
    "pythonic": pythonic.pythonic,
    "qwen3_coder": qwen3_coder.qwen3_coder,
    REQUIRED: forced.required,
}
"""Grammars by format."""
TOOL_TAGS: Mapping[str, tuple[str, ...]] = {
    "glm45": (glm45.OPEN, glm45.CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    HARMONY: harmony.TAGS,
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "kimi_k2": (kimi_k2.OPEN, kimi_k2.CLOSE, kimi_k2.CALL, kimi_k2.ARGUMENTS, kimi_k2.CALL_END),
    "llama3_json": (),
    "mistral": (mistral.OPEN, "[ARGS]", "[CALL_ID]"),
    "pythonic": (),
    "qwen3_coder": (qwen3_coder.OPEN, qwen3_coder.CLOSE),
}
"""Tags without which the calls of a format cannot be found."""
TOOL_PARSERS = {
    "glm45": "glm45",
    "hermes": "hermes",
    "kimi_k2": "kimi_k2",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "openai": HARMONY,
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
}
"""Formats of calls by the names of vLLM's parsers."""

REASONING = {
    "think": ("<think>", "</think>"),
    "think_mistral": ("[THINK]", "[/THINK]"),
    HARMONY: (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END),
}
"""Tags around reasoning, by format."""
REASONING_PARSERS = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "mistral": "think_mistral",
    "openai_gptoss": HARMONY,
    "qwen3": "think",
}
"""Formats of reasoning by the names of vLLM's parsers."""
