"""Chats and completes with the official `openai` package: python tests/clients/openai_client.py URL."""

import sys

import openai

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


def main(url: str) -> None:
    """Raises AssertionError when an answer is wrong."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        chat(client)
        complete(client)


def chat(client: openai.OpenAI) -> None:
    """A conversation: whole, then streamed with usage."""
    whole = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_completion_tokens=24
    )
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop"), whole
    check_usage(whole.usage)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER, chunks
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"], chunks
    assert not last.choices, last
    assert same_counts(last.usage, whole.usage), (last.usage, whole.usage)


def complete(client: openai.OpenAI) -> None:
    """A completion: whole, then streamed with usage."""
    prompt = "The capital of France is"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
    text = whole.choices[0].text
    assert text.startswith(" Paris."), whole
    assert whole.choices[0].finish_reason == "length", whole
    check_usage(whole.usage, completion_tokens=8)
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text, chunks
    assert same_counts(last.usage, whole.usage), (last.usage, whole.usage)


def check_usage(usage: "openai.types.CompletionUsage | None", completion_tokens: int | None = None) -> None:
    """The numbers are there and add up."""
    assert usage is not None
    assert usage.prompt_tokens > 0, usage
    assert usage.completion_tokens == completion_tokens or (completion_tokens is None and usage.completion_tokens > 0)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def same_counts(one: "openai.types.CompletionUsage | None", other: "openai.types.CompletionUsage | None") -> bool:
    """Whether both count the same tokens; how many of them came from the cache may differ."""
    assert one is not None
    assert other is not None
    fields = ("prompt_tokens", "completion_tokens", "total_tokens")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


if __name__ == "__main__":
    main(sys.argv[1])
    print("chat, chat stream with usage, completion, completion stream with usage")
