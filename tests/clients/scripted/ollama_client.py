"""Chats, tools and models through `ollama`: python tests/clients/scripted/ollama_client.py URL."""

import sys
from collections.abc import Callable
from typing import Any

import ollama
from features import CALLS, COMPUTED, DESCRIBES, GREETING, GREETS, MODEL, RECALLED, RECALLS, TEMPERATURE, run_all


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    return str(TEMPERATURE)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inhabitants": {"type": "integer"}},
    "required": ["name", "inhabitants"],
}


def models(url: str) -> None:
    """The models, as lists and one by one."""
    client = ollama.Client(url)
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["pagewire.context_length"] > 0


def tools(url: str) -> None:
    """A call of a Python function, its result, and a second turn as a stream."""
    client = ollama.Client(url)
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    message = client.chat(MODEL, messages, tools=[get_weather]).message
    (call,) = message.tool_calls
    assert call.function.arguments == {"city": "Paris"}, message
    result = get_weather(**call.function.arguments)
    messages += [message, {"role": "tool", "tool_name": call.function.name, "content": result}]
    message = client.chat(MODEL, messages, tools=[get_weather]).message
    assert message.content == COMPUTED, message
    messages += [message, {"role": "user", "content": RECALLS}]
    parts = list(client.chat(MODEL, messages, tools=[get_weather], stream=True, options={"temperature": 0}))
    assert "".join(part.message.content or "" for part in parts) == RECALLED, parts
    assert parts[-1].done_reason == "stop"
    assert (parts[-1].eval_count or 0) > 0


def schema(url: str) -> None:
    """An answer in a form."""
    message = ollama.Client(url).chat(MODEL, [{"role": "user", "content": DESCRIBES}], format=CITY).message
    assert '"Paris"' in (message.content or ""), message


def generate(url: str) -> None:
    """A prompt, whole and as a stream, and a model that is loaded."""
    client = ollama.Client(url)
    assert client.generate(MODEL, GREETS).response == GREETING
    assert "".join(part.response for part in client.generate(f"{MODEL}:latest", GREETS, stream=True)) == GREETING
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"


def errors(url: str) -> None:
    """Refusals, with their reasons."""
    client = ollama.Client(url)
    requests = {
        "no model other": lambda: client.chat("other", [{"role": "user", "content": GREETS}]),
        "embeddings": lambda: client.embed(MODEL, "x"),
        "images": lambda: client.generate(MODEL, "x", images=[b"\x89PNG"]),
    }
    for reason, request in requests.items():
        assert reason in _refusal(request)


def _refusal(request: Callable[[], object]) -> str:
    try:
        request()
    except ollama.ResponseError as error:
        return str(error.error)
    return "not refused"


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "list, ps, show": models,
                "chat with a tool in two turns": tools,
                "chat with a format": schema,
                "generate, load": generate,
                "refusals": errors,
            }
        )
    )
