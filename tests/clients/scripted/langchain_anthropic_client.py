"""Tools and forms through LangChain: python tests/clients/scripted/langchain_anthropic_client.py URL."""

import sys

from features import MODEL, run_all
from langchain_anthropic import ChatAnthropic
from langchain_features import parse, tools


def connect(url: str) -> ChatAnthropic:
    """A model of the server."""
    return ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_retries=0, timeout=60)


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "a tool in two turns": lambda url: tools(connect(url)),
                "json_schema": lambda url: parse(connect(url), "json_schema"),
                "function_calling": lambda url: parse(connect(url), "function_calling"),
            }
        )
    )
