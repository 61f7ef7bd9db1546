"""The formats in which models write tool calls and reasoning, by the names that vLLM gives to their parsers."""

from collections.abc import Callable, Mapping

from pagewire.shared.chat.formats import forced, hermes, llama3_json, mistral, pythonic
from pagewire.shared.chat.reader import Reader, Steps

Grammar = Callable[[Reader], Steps[None]]

REQUIRED = "required"
NAMED = "named"
"""Formats of texts that a grammar forces: several calls, or the arguments of the named one."""

TOOL_CALLS: Mapping[str, Grammar] = {
    "hermes": hermes.hermes,
    "llama3_json": llama3_json.llama3_json,
    "mistral": mistral.mistral,
    "pythonic": pythonic.pythonic,
    REQUIRED: forced.required,
}
"""What reads calls and content, by format."""
TOOL_TAGS = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3_json": (),
    "mistral": (mistral.OPEN, "[ARGS]", "[CALL_ID]"),
    "pythonic": (),
}
"""Tags without which the calls of a format cannot be found."""
TOOL_PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
}
"""Formats by the names of vLLM's parsers."""

REASONING = {"think": ("<think>", "</think>"), "think_mistral": ("[THINK]", "[/THINK]")}
"""Tags around reasoning, by format."""
REASONING_PARSERS = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "mistral": "think_mistral",
    "qwen3": "think",
}
"""Formats by the names of vLLM's parsers."""
