"""Agents of `pydantic-ai`: python tests/clients/scripted/pydantic_ai_client.py URL."""

import sys
from typing import Any

import pydantic
from features import CALLS, COMPUTED, DESCRIBES, MODEL, RECALLED, RECALLS, run_all
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def models(url: str) -> dict[str, Any]:
    """The model of the server by the API."""
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none")),
    }


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "42 degrees"


def tools(url: str, api: str) -> None:
    """A call, its result, and a second turn."""
    agent = Agent(models(url)[api], tools=[get_weather], instructions="Be brief.")
    first = agent.run_sync(CALLS)
    assert first.output == COMPUTED, first
    second = agent.run_sync(RECALLS, message_history=first.all_messages())
    assert second.output == RECALLED, second


def native(url: str, api: str) -> None:
    """A form beside a tool."""
    agent = Agent(models(url)[api], tools=[get_weather], output_type=NativeOutput(City))
    assert isinstance(agent.run_sync(DESCRIBES).output, City)


def by_tool(url: str) -> None:
    """A form as a forced tool."""
    assert isinstance(Agent(models(url)["chat"], output_type=ToolOutput(City)).run_sync(DESCRIBES).output, City)


def prompted(url: str) -> None:
    """A form that the prompt describes, held by the mode for JSON."""
    assert isinstance(Agent(models(url)["chat"], output_type=PromptedOutput(City)).run_sync(DESCRIBES).output, City)


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "chat with a tool in two turns": lambda url: tools(url, "chat"),
                "responses with a tool in two turns": lambda url: tools(url, "responses"),
                "messages with a tool in two turns": lambda url: tools(url, "messages"),
                "NativeOutput beside a tool": lambda url: native(url, "chat"),
                "responses with NativeOutput beside a tool": lambda url: native(url, "responses"),
                "ToolOutput": by_tool,
                "PromptedOutput": prompted,
            }
        )
    )
