"""Every mode of `instructor` that speaks OpenAI's APIs: python tests/clients/scripted/instructor_client.py URL."""

import sys
from collections.abc import Iterable

import instructor
import openai
import pydantic
from features import DESCRIBES, MODEL, run_all
from instructor import Mode

MODES = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.PARALLEL_TOOLS,
    Mode.JSON,
    Mode.JSON_SCHEMA,
    Mode.MD_JSON,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def ask(url: str, mode: Mode) -> None:
    """An answer in a form."""
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    many = mode == Mode.PARALLEL_TOOLS
    answer = client.create(
        model=MODEL,
        messages=[{"role": "user", "content": DESCRIBES}],
        response_model=Iterable[City] if many else City,
        max_retries=0,
    )
    assert all(isinstance(city, City) for city in (answer if many else [answer])), answer


if __name__ == "__main__":
    sys.exit(run_all({mode.name: lambda url, mode=mode: ask(url, mode) for mode in MODES}))
