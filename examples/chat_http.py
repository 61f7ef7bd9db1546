"""Chat over HTTP with the official `openai` package, beside `pagewire serve`: python examples/chat_http.py

OPENAI_BASE_URL leads to a stack that is not on this machine's port 8000.
"""

import os

from openai import OpenAI


def main() -> None:
    """Streams the answer to one question."""
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        max_tokens=32,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
