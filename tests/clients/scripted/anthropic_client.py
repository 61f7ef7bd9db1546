"""Tools and forms with the official `anthropic` package: python tests/clients/scripted/anthropic_client.py URL."""

import sys
from typing import Any

import anthropic
import pydantic
from features import CALLS, COMPUTED, DESCRIBES, MODEL, RECALLED, RECALLS, TEMPERATURE, run_all

TOOL: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class City(pydantic.BaseModel):
    """The class that an answer is parsed into."""

    name: str
    inhabitants: int


def connect(url: str) -> Any:
    """A client of the server."""
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def tools(url: str) -> None:
    """A call, its result, and a second turn."""
    client = connect(url)
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    (call,) = answer.content
    assert (answer.stop_reason, call.type) == ("tool_use", "tool_use"), answer
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": TEMPERATURE}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert answer.content[0].text == COMPUTED, answer
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": RECALLS}]
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
    assert answer.content[0].text == RECALLED, answer


def forced(url: str) -> None:
    """A tool that must be called, streamed."""
    with connect(url).messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": DESCRIBES}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        answer = stream.get_final_message()
    (call,) = answer.content
    assert (answer.stop_reason, call.type) == ("tool_use", "tool_use"), answer
    assert isinstance(call.input["city"], str)


def parse(url: str) -> None:
    """An answer in a form."""
    answer = connect(url).messages.parse(
        model=MODEL, max_tokens=200, messages=[{"role": "user", "content": DESCRIBES}], output_format=City
    )
    assert isinstance(answer.parsed_output, City), answer


if __name__ == "__main__":
    sys.exit(run_all({"a tool in two turns": tools, "stream with a forced tool": forced, "parse": parse}))
