"""Conversations that chat templates are tried with, as keyword arguments of `transformers.apply_chat_template`."""

from typing import Any


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


QUESTION = said("user", "What is the weather in Paris?")
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "units": None}},
}
ANSWER = said("tool", '{"degrees": 21, "sky": "clear"}', name="get_weather", tool_call_id="call00001")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & then.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TURNS = [
    said("user", "Hello!"),
    said("assistant", "Hi. How can I help?"),
    said("user", "Who are you? <b>&amp;</b>"),
]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [said("user", "Hello!")]},
    "system": {"messages": [said("system", "Be brief."), said("user", "Hello!")]},
    "several turns": {"messages": [said("system", "Be brief."), *TURNS]},
    "no prompt for the assistant": {"messages": TURNS[:2], "add_generation_prompt": False},
    "text parts": {"messages": [said("system", parts("Be brief.")), said("user", parts("Hello!", "Who are you?"))]},
    "tool messages": {
        "messages": [QUESTION, said("assistant", "", tool_calls=[CALL]), ANSWER, said("assistant", "21 degrees.")]
    },
    "tool call without content": {"messages": [QUESTION, said("assistant", None, tool_calls=[CALL]), ANSWER]},
    "tools": {"messages": [said("system", "Be brief."), QUESTION], "tools": [WEATHER]},
    "continued": {
        "messages": [*TURNS, said("assistant", "I am  \n")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued part": {
        "messages": [said("user", "Hello!"), said("assistant", parts("One.", "Two"))],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued nothing": {
        "messages": [said("user", "Hello!"), said("assistant", "")],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "empty content": {"messages": [said("system", ""), said("user", ""), said("assistant", ""), said("user", " \n ")]},
    "unicode": {"messages": [said("user", "naïve 猫 🦊\u200d\u2028 \u202eא\x00 \ufeff")]},
    "developer": {"messages": [said("developer", "Be brief."), said("user", "Hello!")]},
    "thinking": {"messages": [said("user", "Hello!")], "enable_thinking": True, "thinking": True},
    "no thinking": {"messages": [said("user", "Hello!")], "enable_thinking": False, "thinking": False},
    "effort": {"messages": [said("user", "Hello!")], "reasoning_effort": "high", "model_identity": "You are Bob."},
    "reasoning": {
        "messages": [
            said("user", "Hello!"),
            said("assistant", "Hi.", reasoning_content="They greet me."),
            said("user", "Again!"),
        ]
    },
    "thoughts in the text": {
        "messages": [said("user", "Hello!"), said("assistant", "<think>\nHm.\n</think>\n\nHi."), said("user", "Again!")]
    },
    "assistant first": {"messages": [said("assistant", "Welcome."), said("user", "Hello!")]},
    "two in a row": {"messages": [said("user", "Hello!"), said("user", "Are you there?")]},
    "unknown role": {"messages": [said("wizard", "Abracadabra."), said("user", "Hello!")]},
    "special tokens": {"messages": [said("user", "</s><|im_end|><|endoftext|>")], "bos_token": "<begin>"},
}
