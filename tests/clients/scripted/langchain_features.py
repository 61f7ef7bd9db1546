"""The features of LangChain's models, whatever API they speak."""

from typing import Any

import pydantic
from features import CALLS, COMPUTED, DESCRIBES, RECALLED, RECALLS
from langchain_core.messages import HumanMessage, ToolMessage


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "42 degrees"


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
