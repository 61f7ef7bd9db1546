"""Let the model call a function until it answers: python examples/tool_calls.py

It runs beside `pagewire serve MODEL --enable-auto-tool-choice` with a model whose chat template shows tools, such as
Qwen2.5.
"""

import json

from pagewire import Client, read_message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "Returns the temperature of a city in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Tokyo", "Paris", "Lima"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
FIRST = {"type": "function", "function": {"name": "temperature"}}
"""The first answer must call this function; later ones are the model's choice."""
ROUNDS = 4
"""Answers with calls after which the loop ends."""


def temperature(city: str) -> int:
    """Returns the temperature of a city."""
    return {"Tokyo": 21, "Paris": 14, "Lima": 18}[city]


def main() -> None:
    """Answers calls until the model writes a text."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "How warm is it in Tokyo?"}]
    with Client() as client:
        for turn in range(ROUNDS):
            choice = "auto" if turn else FIRST
            result = client.chat(messages, tools=TOOLS, tool_choice=choice, temperature=0.0, max_tokens=512)
            message = read_message(result.choices[0].text, result.chat_format)
            if not message.calls:
                print(f"answer: {message.content!r}")
                return
            calls = [
                {
                    "type": "function",
                    "id": f"call-{turn}-{index}",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(message.calls)
            ]
            messages.append({"role": "assistant", "content": message.content or "", "tool_calls": calls})
            for index, call in enumerate(message.calls):
                degrees = temperature(**json.loads(call.arguments))
                print(f"{call.name}({call.arguments}) is {degrees}")
                messages.append({"role": "tool", "tool_call_id": f"call-{turn}-{index}", "content": str(degrees)})


if __name__ == "__main__":
    main()
