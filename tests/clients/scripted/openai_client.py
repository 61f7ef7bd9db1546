"""Tools and forms with the official `openai` package: python tests/clients/scripted/openai_client.py URL."""

import sys
from typing import Any

import openai
import pydantic
from features import CALLS, COMPUTED, DESCRIBES, MODEL, RECALLED, RECALLS, TEMPERATURE, run_all

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


class City(pydantic.BaseModel):
    """The class that an answer is parsed into."""

    name: str
    inhabitants: int


def connect(url: str) -> Any:
    """A client of the server."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def chat_tools(url: str) -> None:
    """A call, its result, and a second turn, by chat."""
    client = connect(url)
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.arguments == '{"city": "Paris"}', call
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TEMPERATURE}]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    assert message.content == COMPUTED, message
    messages += [message, {"role": "user", "content": RECALLS}]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    assert message.content == RECALLED, message


def chat_stream(url: str) -> None:
    """A streamed call, gathered by the package."""
    with connect(url).chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": CALLS}], tools=[TOOL]
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"city": "Paris"} or call.function.arguments == '{"city": "Paris"}', call


def chat_parse(url: str) -> None:
    """An answer in a form, beside a tool."""
    answer = connect(url).chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": DESCRIBES}], tools=[TOOL], response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City), answer


def respond_tools(url: str) -> None:
    """A call, its result, and a second turn, by responses."""
    client = connect(url)
    items: list[Any] = [{"role": "user", "content": CALLS}]
    answer = client.responses.create(model=MODEL, input=items, tools=[FLAT_TOOL])
    (call,) = answer.output
    assert call.type == "function_call", answer
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": TEMPERATURE}]
    answer = client.responses.create(model=MODEL, input=items, tools=[FLAT_TOOL])
    assert answer.output_text == COMPUTED, answer
    items += [*answer.output, {"role": "user", "content": RECALLS}]
    assert client.responses.create(model=MODEL, input=items, tools=[FLAT_TOOL]).output_text == RECALLED


def respond_parse(url: str) -> None:
    """A response in a form."""
    answer = connect(url).responses.parse(
        model=MODEL, input=DESCRIBES, text_format=City, reasoning={"effort": "low"}, text={"verbosity": "low"}
    )
    assert isinstance(answer.output_parsed, City), answer


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "chat with a tool in two turns": chat_tools,
                "chat stream with a tool": chat_stream,
                "chat parse beside a tool": chat_parse,
                "responses with a tool in two turns": respond_tools,
                "responses parse with effort and verbosity": respond_parse,
            }
        )
    )
