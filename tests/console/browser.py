"""Headless Chromium on a console, and what it has asked, refused and run meanwhile."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"phone": 390, "tablet": 900, "desktop": 1360}
"""Widths of the pages, in pixels."""
HEIGHT = 860
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Runs the system's Chromium."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Console:
    """A page of a server's console.

    Attributes:
        requests: URLs that the page has asked for.
        errors: what scripts have raised.
        violations: what the Content-Security-Policy has blocked.
    """

    page: Page
    origin: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> None:
        self.page.goto(self.origin + path, wait_until="load")

    def ask(self, text: str) -> None:
        """Sends a message."""
        self.page.get_by_role("textbox", name="Message").fill(text)
        self.page.get_by_role("button", name="Send", exact=True).click()

    def until_answered(self) -> None:
        """Waits until the last answer has ended and can be repeated."""
        self.page.wait_for_function(
            "() => /Regenerate|Try again/.test("
            "[...document.querySelectorAll('pw-turn.assistant')].at(-1)?.querySelector('footer').textContent)"
        )

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        return str(self.page.evaluate("[...document.querySelectorAll('pw-turn.assistant')].at(-1).turn.text"))

    def foreign_requests(self) -> list[str]:
        """URLs of other servers, or of no server at all."""
        own = urlsplit(self.origin).netloc
        return [url for url in self.requests if urlsplit(url).netloc != own and not url.startswith("blob:")]


@contextmanager
def console(
    browser: Browser, origin: str, width: int = WIDTHS["desktop"], theme: Theme = "light", video: Path | None = None
) -> Iterator[Console]:
    """Opens a console in a browser profile of its own."""
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme=theme,
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    view = Console(page, origin)
    page.on("request", lambda request: view.requests.append(request.url))
    page.on("pageerror", lambda error: view.errors.append(str(error)))
    page.expose_function("reportViolation", lambda text: view.violations.append(text))  # noqa: PLW0108 - it gets an attribute
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) =>"
        " reportViolation(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`))"
    )
    try:
        yield view
    finally:
        context.close()


@contextmanager
def opened(browser: Browser, origin: str, ready: str) -> Iterator[Console]:
    """Opens a console and waits until an expression is true. Whatever the page does wrong meanwhile fails the test."""
    with console(browser, origin) as view:
        view.open()
        view.page.wait_for_function(f"() => {ready}")
        yield view
        assert not view.errors
        assert not view.violations
        assert not view.foreign_requests()
