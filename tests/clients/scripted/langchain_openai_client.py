"""Tools and forms through LangChain: python tests/clients/scripted/langchain_openai_client.py URL."""

import sys
from typing import Any

import pydantic
from features import CALLS, COMPUTED, DESCRIBES, MODEL, RECALLED, RECALLS, run_all
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "42 degrees"


def connect(url: str, **settings: Any) -> ChatOpenAI:
    """A model of the server."""
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **settings)


def tools(model: Any) -> None:
    """A call, its result, and a second turn."""
    able = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(CALLS)]
    answer = able.invoke(messages)
    (call,) = answer.tool_calls
    assert call["args"] == {"city": "Paris"}, answer
    messages += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    answer = able.invoke(messages)
    assert answer.text == COMPUTED, answer
    messages += [answer, HumanMessage(RECALLS)]
    first, *others = able.stream(messages)
    assert sum(others, start=first).text == RECALLED


def parse(model: Any, method: str) -> None:
    """An answer in a form."""
    answer = model.with_structured_output(City, method=method).invoke(DESCRIBES)
    assert isinstance(answer, City), answer


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "a tool in two turns": lambda url: tools(connect(url)),
                "responses with a tool in two turns": lambda url: tools(connect(url, use_responses_api=True)),
                "json_schema": lambda url: parse(connect(url), "json_schema"),
                "function_calling": lambda url: parse(connect(url), "function_calling"),
                "reasoning_effort and verbosity": lambda url: tools(
                    connect(url, reasoning_effort="low", verbosity="low")
                ),
            }
        )
    )
