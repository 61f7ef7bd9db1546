"""axe-core finds nothing in any view, at three screen sizes, in both themes."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.console.browser import WIDTHS, Console, Theme, console
from tests.console.scripted_server import ScriptedServer

pytestmark = pytest.mark.full
AXE = Path(os.environ.get("AXE", Path(__file__).parents[2] / "build/console/node_modules/axe-core/axe.min.js"))
"""Where `make test-console` puts axe-core."""
TEXT = (
    "Some *emphasis*\n\n- one\n- two\n\n```py\nprint(1)\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n> quoted\n\n# Title"
)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_axe_finds_no_violation(browser: Browser, server: ScriptedServer, width: int, theme: Theme) -> None:
    if not AXE.exists():
        pytest.skip(f"{AXE} is missing: make test-console installs it")
    server.model.text = TEXT
    server.gateway.console._demo_faults = True
    with console(browser, server.url, width, theme) as view:
        view.open()
        view.page.evaluate(AXE.read_text())
        view.page.wait_for_function("() => document.querySelector('pw-settings select')?.value === 'tiny'")
        problems = {"empty": violations(view)}
        view.page.evaluate("() => { document.querySelector('pw-settings .check input').click() }")
        view.ask("Hi")
        view.until_answered()
        view.page.get_by_role("button", name="Regenerate").click()
        view.page.get_by_text("2 / 2").wait_for()
        view.until_answered()
        problems["chat"] = violations(view)
        view.page.get_by_role("button", name="Tokens").click()
        view.page.locator(".token").nth(2).hover()
        problems["tokens"] = violations(view)
        for panel in view.page.locator(".panel-buttons button:visible").all():
            panel.click()
            problems[panel.inner_text()] = violations(view)
            panel.click()
        view.page.get_by_role("link", name="Waterfall").click()
        view.page.locator("pw-waterfall .span").first.wait_for()
        problems["pipeline"] = violations(view)
        assert not [f"{part}: {line}" for part, lines in problems.items() for line in lines]


def violations(view: Console) -> list[str]:
    """The violations that axe finds, one line each."""
    return [
        str(line)
        for line in view.page.evaluate(
            """async () => (await axe.run()).violations.flatMap((each) =>
            each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 160)} ${node.failureSummary.slice(0, 200)}`))"""
        )
    ]
