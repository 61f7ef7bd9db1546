"""Chats through `litellm`: python tests/clients/litellm_client.py URL."""

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; without it litellm fetches a list of prices

import litellm

QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


def main(url: str) -> None:
    """Raises AssertionError when an answer is wrong."""
    request: dict[str, Any] = {
        "model": "openai/smollm2-135m-instruct",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
        "timeout": 60,
        "num_retries": 0,
    }
    whole = litellm.completion(**request)
    assert whole.choices[0].message.content == ANSWER, whole
    assert whole.choices[0].finish_reason == "stop", whole
    assert whole.usage.prompt_tokens > 0 < whole.usage.completion_tokens, whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole

    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER, chunks
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    ), (usage, whole.usage)


if __name__ == "__main__":
    main(sys.argv[1])
    print("chat, chat stream with usage")
