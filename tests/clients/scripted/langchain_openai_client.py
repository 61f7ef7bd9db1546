"""Tools and forms through LangChain: python tests/clients/scripted/langchain_openai_client.py URL."""

import sys
from typing import Any

from features import MODEL, run_all
from langchain_features import parse, tools
from langchain_openai import ChatOpenAI


def connect(url: str, **settings: Any) -> ChatOpenAI:
    """A model of the server."""
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **settings)


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
