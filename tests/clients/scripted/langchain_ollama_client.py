"""Tools and forms through LangChain's Ollama: python tests/clients/scripted/langchain_ollama_client.py URL."""

import sys
from typing import Any

from features import GREETING, GREETS, MODEL, run_all
from langchain_features import parse, tools
from langchain_ollama import ChatOllama, OllamaLLM


def connect(url: str, **settings: Any) -> ChatOllama:
    """A model of the server."""
    return ChatOllama(model=MODEL, base_url=url, validate_model_on_init=True, **settings)


def prompt(url: str) -> None:
    """A prompt, whole and as a stream."""
    model = OllamaLLM(model=MODEL, base_url=url, temperature=0)
    assert model.invoke(GREETS) == GREETING
    assert "".join(model.stream(GREETS)) == GREETING


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "a tool in two turns": lambda url: tools(connect(url, temperature=0)),
                "json_schema": lambda url: parse(connect(url), "json_schema"),
                "function_calling": lambda url: parse(connect(url), "function_calling"),
                "reasoning": lambda url: tools(connect(url, reasoning=True)),
                "OllamaLLM": prompt,
            }
        )
    )
