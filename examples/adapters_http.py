"""Ask a model and its adapters (LoRA) with the official `openai` package: python examples/adapters_http.py

Beside `pagewire serve MODEL --enable-lora --lora-modules NAME=FOLDER`. OPENAI_BASE_URL leads to a stack that is not on
this machine's port 8000.
"""

import os

from openai import OpenAI


def main() -> None:
    """Prints the text of each adapter, and of the model that it changes."""
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    for model in client.models.list():
        parent = (model.model_extra or {}).get("parent")
        kind = f"an adapter of {parent}" if parent else "a model"
        answer = client.completions.create(model=model.id, prompt="Once upon a time", max_tokens=16, temperature=0)
        print(f"{model.id} is {kind}: {answer.choices[0].text!r}")


if __name__ == "__main__":
    main()
