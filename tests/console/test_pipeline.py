"""The pipeline view on a real stack: faults by a button, and an answer that goes on."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.console.browser import Console, opened
from tests.pagewire.serving import Served, serving

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--demo-faults", "--model", "bundled", "--max-num-seqs", "4") as stack:
        yield stack


@pytest.fixture
def view(browser: Browser, served: Served) -> Iterator[Console]:
    with opened(browser, served.http, "document.querySelector('pw-settings select')?.value") as page:
        yield page


def pick(view: Console, service: str, fault: str) -> None:
    view.page.get_by_role("button", name=f"{fault} {service}").first.click()


def ask_long(view: Console) -> None:
    view.page.get_by_label("max_tokens", exact=True).fill("400")
    view.page.get_by_label("ignore_eos", exact=True).check()
    view.page.get_by_label("temperature", exact=True).fill("0")
    view.ask("Once upon a time")


def test_an_answer_goes_on_when_the_executor_is_killed(view: Console) -> None:
    ask_long(view)
    view.until_answered()
    expected = view.answer
    view.page.get_by_role("button", name="Regenerate").click()
    view.page.wait_for_function(
        "() => [...document.querySelectorAll('pw-turn.assistant')].at(-1).turn.text.length > 20"
    )
    view.page.get_by_role("link", name="Pipeline", exact=True).click()
    pick(view, "executor", "kill")
    view.page.locator(".restarts", has_text="1 restart").first.wait_for()
    view.page.get_by_role("link", name="Playground", exact=True).click()
    view.until_answered()
    assert view.page.locator(".problem:not(:empty)").count() == 0
    assert view.answer == expected


def test_steps_blocks_and_a_waterfall_are_shown(view: Console) -> None:
    ask_long(view)
    view.page.get_by_role("link", name="Pipeline", exact=True).click()
    view.page.locator("pw-steps .figure", has_text="lease left").wait_for()
    view.page.locator("pw-blocks .legend", has_text="held").wait_for()
    view.page.locator("pw-requests tr[data-state=done]").first.wait_for()
    view.page.locator("pw-requests a").first.click()
    view.page.locator("pw-waterfall", has_text="decode").wait_for()
    link = view.page.url
    view.page.goto("about:blank")
    view.page.goto(link)
    view.page.locator("pw-waterfall", has_text="prefill").wait_for()


@pytest.mark.parametrize(("service", "fault"), [("detokenizer", "drain"), ("tokenizer", "freeze"), ("gateway", "kill")])
def test_a_fault_is_seen_and_healed(view: Console, service: str, fault: str) -> None:
    view.page.get_by_role("link", name="Pipeline", exact=True).click()
    card = view.page.locator(".stage", has_text=service.capitalize()).or_(view.page.locator(".stage", has_text=service))
    first = card.locator(".instance[data-state=ready]").first
    first.wait_for()
    instance = first.get_attribute("data-id")
    pick(view, service, fault)
    view.page.wait_for_function(
        "([service, old]) => { const ids = [...document.querySelectorAll('.instance[data-state=ready]')]"
        " .filter((card) => card.closest('.stage').querySelector('h3').textContent.startsWith(service))"
        " .map((card) => card.dataset.id); return ids.length && !ids.includes(old) }",
        arg=[service, instance],
    )
    assert view.page.locator("pw-pipeline > .problem:not(:empty)").count() == 0
