"""Prompts in the log line of a request."""

from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from pagewire.shared.settings.config import Settings
from tests.services.tokenizer.harness import serving

pytestmark = pytest.mark.anyio

TEXT = "a secret wish " * 400


async def line(body: dict[str, Any], *, log_prompts: bool) -> dict[str, Any]:
    """The log line of a request."""
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        async with serving(Settings(model="bundled", log_prompts=log_prompts)) as setup:
            await setup.send({**body, "truncate_prompt_tokens": 8, "sampling": {"max_tokens": 1}})
            await setup.until_idle()
    (logged,) = [entry for entry in lines if entry["event"] == "request"]
    return dict(logged)


async def test_the_log_has_no_text_of_a_client_by_default() -> None:
    entry = await line({"prompt": TEXT}, log_prompts=False)
    assert "secret" not in str(entry)


async def test_the_log_has_the_beginning_of_each_prompt_on_demand() -> None:
    entry = await line({"prompt": [TEXT, "short"]}, log_prompts=True)
    assert entry["prompts"] == [TEXT[:4096], "short"]
