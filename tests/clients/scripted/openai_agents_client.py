"""Agents of `openai-agents`: python tests/clients/scripted/openai_agents_client.py URL."""

import sys

import openai
import pydantic
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from features import CALLS, COMPUTED, DESCRIBES, MODEL, RECALLED, RECALLS, run_all

set_tracing_disabled(True)


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "42 degrees"


def connect(url: str, api: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> Model:
    """The model of the server by an API."""
    return api(MODEL, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


def tools(model: Model) -> None:
    """A call, its result, and a second turn of the session."""
    agent = Agent("helper", model=model, instructions="Be brief.", tools=[function_tool(get_weather)])
    session = SQLiteSession("one")
    first = Runner.run_sync(agent, CALLS, session=session)
    assert first.final_output == COMPUTED, first
    second = Runner.run_sync(agent, RECALLS, session=session)
    assert second.final_output == RECALLED, second


def form(model: Model) -> None:
    """A form and a tool that must be called."""
    agent = Agent(
        "helper",
        model=model,
        tools=[function_tool(get_weather)],
        output_type=City,
        model_settings=ModelSettings(tool_choice="required", verbosity="low"),
    )
    assert isinstance(Runner.run_sync(agent, DESCRIBES).final_output, City)


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "responses with a tool in two turns": lambda url: tools(connect(url, OpenAIResponsesModel)),
                "chat with a tool in two turns": lambda url: tools(connect(url, OpenAIChatCompletionsModel)),
                "responses with output_type and a forced tool": lambda url: form(connect(url, OpenAIResponsesModel)),
                "chat with output_type and a forced tool": lambda url: form(connect(url, OpenAIChatCompletionsModel)),
            }
        )
    )
