"""Writes the screenshots of `docs/console/`: `python -m tests.console.screenshots`."""

import sys
from pathlib import Path

from tests.console.browser import THEMES, WIDTHS, Console, chromium, console
from tests.pagewire.serving import serving

FOLDER = Path(__file__).parents[2] / "docs/console"
QUESTION = "Give me three tips for writing clear English."


def write(view: Console, name: str, folder: Path) -> None:
    """Takes pictures of both views."""
    page = view.page
    page.wait_for_function("() => document.querySelector('pw-settings select')?.value")
    page.evaluate("document.querySelector('pw-settings .check input').click()")
    view.ask(QUESTION)
    view.until_answered()
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 / 2").wait_for()
    view.until_answered()
    page.mouse.move(0, 0)
    page.screenshot(path=folder / f"playground-{name}.png")
    page.get_by_label("max_tokens", exact=True).evaluate(
        "(input) => { input.value = '800'; input.dispatchEvent(new Event('input')) }"
    )
    view.ask("Tell me a long story.")
    page.get_by_role("link", name="Pipeline", exact=True).click()
    page.locator("pw-steps .figure", has_text="lease left").wait_for()
    page.wait_for_timeout(6000)
    page.screenshot(path=folder / f"pipeline-{name}.png")
    page.locator("pw-requests a").last.click()
    page.locator("pw-waterfall .span").first.wait_for()
    page.locator("pw-waterfall").scroll_into_view_if_needed()
    page.screenshot(path=folder / f"waterfall-{name}.png")


def main(folder: Path) -> None:
    """Takes them at each width, in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving("--demo-faults") as served, chromium() as browser:
        for width_name, width in WIDTHS.items():
            for theme in THEMES:
                with console(browser, served.http, width, theme) as view:
                    view.open()
                    write(view, f"{width_name}-{theme}", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
