"""Tools, efforts and routes through `litellm`: python tests/clients/scripted/litellm_client.py URL."""

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; without it litellm fetches a list of prices

import litellm
from features import CALLS, COMPUTED, GREETING, GREETS, MODEL, TEMPERATURE, run_all

litellm.suppress_debug_info = True
"""Advice on standard output."""

TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def complete(url: str, provider: str) -> None:
    """A call and its result."""
    base = url if provider in {"anthropic", "ollama_chat"} else f"{url}/v1"
    request: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": "none",
        "timeout": 60,
        "max_tokens": 200,  # without it litellm asks Anthropic's API for more tokens than a model's context has
    }
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    message = litellm.completion(**request, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert '"Paris"' in call.function.arguments, call
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": TEMPERATURE}]
    message = litellm.completion(**request, messages=messages, tools=[TOOL]).choices[0].message
    assert message.content == COMPUTED, message


def effort(url: str) -> None:
    """An effort of reasoning, handed on."""
    message = (
        litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": GREETS}],
            reasoning_effort="low",
            allowed_openai_params=["reasoning_effort"],
        )
        .choices[0]
        .message
    )
    assert message.content == GREETING, message


def generate(url: str) -> None:
    """A prompt of Ollama's, whole and as a stream."""
    request: dict[str, Any] = {"model": f"ollama/{MODEL}", "api_base": url, "api_key": "none"}
    messages = [{"role": "user", "content": GREETS}]
    assert litellm.completion(**request, messages=messages).choices[0].message.content == GREETING
    chunks = litellm.completion(**request, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING


def respond(url: str) -> None:
    """A response."""
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", input=GREETS)
    assert answer.output[-1].content[0].text == GREETING, answer


if __name__ == "__main__":
    sys.exit(
        run_all(
            {
                "openai/ with a tool": lambda url: complete(url, "openai"),
                "hosted_vllm/ with a tool": lambda url: complete(url, "hosted_vllm"),
                "anthropic/ with a tool": lambda url: complete(url, "anthropic"),
                "ollama_chat/ with a tool": lambda url: complete(url, "ollama_chat"),
                "ollama/": generate,
                "reasoning_effort": effort,
                "responses": respond,
            }
        )
    )
