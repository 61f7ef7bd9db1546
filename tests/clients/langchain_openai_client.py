"""Chats through LangChain's `ChatOpenAI`: python tests/clients/langchain_openai_client.py URL."""

import sys

from langchain_openai import ChatOpenAI

QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


def main(url: str) -> None:
    """Raises AssertionError when an answer is wrong."""
    model = ChatOpenAI(
        model="smollm2-135m-instruct",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=24,
        max_retries=0,
        timeout=60,
        stream_usage=True,
    )
    whole = model.invoke(QUESTION)
    assert whole.content == ANSWER, whole
    assert whole.response_metadata["finish_reason"] == "stop", whole
    usage = whole.usage_metadata
    assert usage, whole
    assert usage["input_tokens"] > 0 < usage["output_tokens"], usage
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage

    first, *others = model.stream(QUESTION)
    joined = sum(others, start=first)  # chunks add up to a message, usage included
    assert joined.content == ANSWER, joined
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [joined.usage_metadata[key] for key in counts] == [usage[key] for key in counts], (joined, usage)


if __name__ == "__main__":
    main(sys.argv[1])
    print("ChatOpenAI.invoke, ChatOpenAI.stream with usage")
