"""Have the answer follow a JSON schema, beside `pagewire serve`: python examples/structured_output.py"""

import json

from pagewire import Client, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
    "required": ["color", "warm"],
    "additionalProperties": False,
}


def main() -> None:
    """Prints the color of the sky as an object."""
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    sampling = SamplingParams(max_tokens=64, structured_outputs=form)
    with Client() as client:
        result = client.chat([{"role": "user", "content": "Which color is the sky?"}], sampling)
    answer = json.loads(result.choices[0].text)
    print(f"{answer['color']}, {'warm' if answer['warm'] else 'cold'}")


if __name__ == "__main__":
    main()
