"""Shared by the scripts of this folder: the scripted model's words, and a run of all features of a client."""

import sys
import traceback
from collections.abc import Callable

MODEL = "scripted"
CALLS, RECALLS, GREETS = "COMPUTE the weather in Paris.", "RECALL the result.", "Hi."
DESCRIBES = "DESCRIBE a city in JSON."
"""Questions: the model calls a tool, tells the result of an earlier call, says hello, or describes a city in JSON."""
TEMPERATURE = "42 degrees"
"""Result of the tool get_weather."""
COMPUTED, RECALLED, GREETING = "The result is 42.", "The result was 42.", "Hello there."
"""Answers to the tool's result and to the questions."""

Feature = Callable[[str], None]
"""Takes the URL of the server, and raises when an answer is wrong."""


def run_all(features: dict[str, Feature]) -> int:
    """Prints the names of the features that work, and the errors of the others; returns their number."""
    works: list[str] = []
    for name, feature in features.items():
        try:
            feature(sys.argv[1])
            works.append(name)
        except Exception:  # noqa: BLE001  # of any client
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr)
    print(", ".join(works))
    return len(features) - len(works)
