"""The playground in headless Chromium, against a model whose answers are written here."""

import json
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser

from tests.console.browser import WIDTHS, Console, console
from tests.console.scripted_server import Model, ScriptedServer, scripted_server


def test_a_message_is_sent_and_its_answer_shown(view: Console, model: Model) -> None:
    view.ask("Hi")
    view.until_answered()
    assert view.answer == model.text
    assert view.page.locator("pw-turn.assistant strong").inner_text() == "world"
    assert view.page.locator("pw-turn.assistant code").inner_text() == "code"
    assert "tokens" in view.page.locator(".figures").last.inner_text()
    assert "ms to the first token" in view.page.locator(".figures").last.inner_text()


full = pytest.mark.full  # the others run in `make test-console`


@full
def test_a_stopped_answer_keeps_the_text_that_has_come(view: Console, server: ScriptedServer) -> None:
    server.model.holds = True
    cancels = len(server.gateway.responder.cancels)
    view.ask("Hi")
    view.page.locator("pw-turn.assistant strong").wait_for()
    view.page.get_by_role("button", name="Stop").click()
    view.until_answered()
    assert view.answer == server.model.text
    assert "stopped" in view.page.locator(".figures").last.inner_text()
    view.page.wait_for_timeout(200)
    assert len(server.gateway.responder.cancels) == cancels + 1


@full
def test_an_edit_and_a_repeated_answer_are_branches(view: Console, model: Model) -> None:
    view.ask("First")
    view.until_answered()
    model.text = "Another."
    view.page.get_by_role("button", name="Regenerate").click()
    view.page.get_by_text("2 / 2").wait_for()
    view.until_answered()
    assert view.answer == "Another."
    view.page.get_by_role("button", name="Previous branch").click()
    assert view.answer == "Hello **world**, this is `code`."
    view.page.get_by_role("button", name="Edit").click()
    view.page.get_by_role("textbox", name="Edited text").fill("Second")
    model.text = "To the second."
    view.page.get_by_role("button", name="Send as a branch").click()
    view.until_answered()
    view.page.wait_for_function("() => document.querySelectorAll('.branches').length === 1")
    assert view.answer == "To the second."
    assert [message.content for message in model.requests[-1].messages or ()] == ["Second"]
    view.page.get_by_role("button", name="Previous branch").click()
    assert view.page.locator("pw-turn.user .text").text_content() == "First"


@full
def test_several_choices_are_branches(view: Console, model: Model) -> None:
    view.page.get_by_label("n", exact=True).fill("3")
    view.ask("Hi")
    view.until_answered()
    view.page.get_by_text("1 / 3").wait_for()
    assert model.requests[-1].sampling.n == 3


@full
def test_fields_are_sent_only_if_they_differ_and_wrong_ones_are_named(view: Console, model: Model) -> None:
    view.page.get_by_label("temperature", exact=True).fill("0.25")
    view.page.get_by_label("stop", exact=True).fill("END")
    view.page.get_by_label("top_k", exact=True).fill("1.5")
    assert view.page.get_by_text("top_k is a whole number").is_visible()
    view.page.get_by_label("top_k", exact=True).fill("")
    view.page.get_by_label("System prompt").fill("Be brief.")
    view.ask("Hi")
    view.until_answered()
    request = model.requests[-1]
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.top_p) == (0.25, "END", 1.0)
    assert [(message.role, message.content) for message in request.messages or ()] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]


@full
def test_a_tool_is_called_and_its_result_sent(view: Console, server: ScriptedServer) -> None:
    server.calls_tools()
    server.model.text = '<tool_call>\n{"name": "weather", "arguments": {"city": "<b>Rome</b>"}}\n</tool_call>'
    view.page.locator("pw-settings summary", has_text="Tools").click()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    view.page.get_by_label("Tools, as a JSON list").fill(json.dumps(tools))
    view.ask("How is Rome?")
    view.page.get_by_text("<b>Rome</b>").wait_for()
    server.model.text = "Sunny."
    view.page.get_by_role("textbox", name="Result of weather").fill("25 degrees")
    view.page.get_by_role("button", name="Send results").click()
    view.page.locator("pw-turn .text", has_text="Sunny.").wait_for()
    messages = server.model.requests[-1].messages
    assert messages is not None
    call, result = messages[-2:]
    assert call.tool_calls is not None
    assert (call.tool_calls[0]["function"]["name"], result.role, result.content) == ("weather", "tool", "25 degrees")
    assert result.tool_call_id == call.tool_calls[0]["id"]


@full
def test_a_schema_is_sent_and_one_that_is_no_json_is_refused(view: Console, model: Model) -> None:
    view.page.locator("pw-settings summary", has_text="JSON schema").click()
    box = view.page.get_by_label("JSON schema that answers keep to")
    box.fill("{")
    view.ask("Hi")
    view.page.get_by_text("the JSON schema are not JSON").wait_for()
    box.fill('{"type": "object"}')
    model.text = "{}"
    view.ask("Hi")
    view.until_answered()
    assert msgspec.to_builtins(model.requests[-1].sampling.structured_outputs)["json"] == {"type": "object"}


@full
def test_a_completion_goes_on_with_the_text(view: Console, model: Model) -> None:
    view.page.get_by_label("Kind").select_option("completion")
    model.text = " a time."
    view.ask("Once upon")
    view.until_answered()
    view.ask(" Then")
    view.until_answered()
    view.page.wait_for_function("() => document.querySelectorAll('pw-turn.assistant').length === 2")
    assert model.requests[-1].prompt == "Once upon a time. Then"


@full
def test_the_probabilities_of_tokens_are_shown_on_hover_and_by_keys(view: Console, model: Model) -> None:
    view.page.get_by_label("Token probabilities").check()
    view.ask("Hi")
    view.until_answered()
    assert model.requests[-1].sampling.logprobs == 5
    view.page.get_by_role("button", name="Tokens").click()
    view.page.locator(".token").first.hover()
    assert "90.5 %" in view.page.locator(".token-card").inner_text()
    view.page.locator("pw-tokens").focus()
    view.page.keyboard.press("ArrowRight")
    assert "token 2 of" in view.page.locator(".token-card").inner_text()


@full
def test_drafted_and_forced_tokens_are_marked(view: Console, model: Model) -> None:
    view.page.get_by_label("return_token_origins", exact=True).check()
    view.ask("Hi")
    view.until_answered()
    assert model.requests[-1].return_token_origins
    view.page.get_by_role("button", name="Tokens").click()
    tokens = view.page.locator(".tokens")
    assert [tokens.locator(f".{origin}").count() for origin in ("drafted", "forced")] == [2, 1]
    assert "drafted 2 of 5" in view.page.locator(".token-legend").inner_text()
    tokens.locator(".drafted").first.hover()
    assert "drafted, token 2 of 5" in view.page.locator(".token-card").inner_text()


@full
def test_conversations_stay_and_are_exported_and_imported(view: Console, tmp_path: Path) -> None:
    view.ask("Keep this")
    view.until_answered()
    view.page.wait_for_timeout(600)
    view.page.reload()
    view.page.locator("pw-turn.user", has_text="Keep this").wait_for()
    with view.page.expect_download() as download:
        view.page.get_by_role("button", name="Export all").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    view.page.get_by_role("button", name="Remove Keep this").click()
    assert view.page.locator("pw-turn").count() == 0
    view.page.locator("input[type=file]").set_input_files(file)
    view.page.locator("pw-turn.user", has_text="Keep this").wait_for()
    assert view.page.locator("pw-turn.assistant strong").inner_text() == "world"
    for damaged in (
        "{",
        "{}",
        '{"format": "pagewire.conversations.v1", "conversations": [{"turns": {"a": {"parent": "b"}}}]}',
    ):
        file.write_text(damaged)
        view.page.locator("input[type=file]").set_input_files(file)
        view.page.locator("pw-conversations .problem:not(:empty)").wait_for()


@full
def test_each_snippet_is_copied(view: Console) -> None:
    view.page.get_by_label("temperature", exact=True).fill("0.5")
    view.ask('It\'s "quoted"')
    view.until_answered()
    for name, expected in {
        "curl": "/v1/chat/completions",
        "openai": "client.chat.completions.create(",
        "nats-py": 'pagewire.v1.generate.tiny"',
        "pagewire": "client.stream(",
    }.items():
        view.page.locator(".copies").get_by_role("button", name=name).click()
        view.page.get_by_role("button", name="Copied").wait_for()
        text = view.page.evaluate("navigator.clipboard.readText()")
        assert expected in text
        assert "temperature" in text
        assert "quoted" in text
        if name != "curl":
            compile(text, name, "exec")
        view.page.get_by_role("button", name="Copied").wait_for(state="detached")


@full
def test_the_keyboard_sends_stops_and_edits(view: Console, model: Model) -> None:
    message = view.page.get_by_role("textbox", name="Message")
    message.fill("one")
    message.press("Shift+Enter")
    message.type("two")
    message.press("Enter")
    view.until_answered()
    assert [each.content for each in model.requests[-1].messages or ()] == ["one\ntwo"]
    message.press("ArrowUp")
    assert view.page.get_by_role("textbox", name="Edited text").input_value() == "one\ntwo"
    view.page.keyboard.press("Escape")
    model.holds = True
    message.fill("more")
    message.press("Enter")
    view.page.get_by_role("button", name="Stop").wait_for()
    message.press("Escape")
    view.until_answered()


@full
def test_the_theme_is_chosen_and_stays(view: Console) -> None:
    def ground() -> str:
        return str(view.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    toggle = view.page.get_by_role("button", name="Theme")
    toggle.click()
    assert ground() == light
    toggle.click()
    dark = ground()
    assert dark != light
    view.page.reload()
    assert ground() == dark


@full
def test_a_server_with_a_key_asks_for_it(browser: Browser) -> None:
    with scripted_server(api_key="secret-key-of-a-test") as server, console(browser, server.url) as view:
        view.open()
        key = view.page.get_by_label("Key", exact=True)
        key.fill("wrong")
        view.page.get_by_role("button", name="Use this key").click()
        view.page.get_by_text("does not know this key").wait_for()
        key.fill("secret-key-of-a-test")
        view.page.get_by_role("button", name="Use this key").click()
        view.page.wait_for_function("() => document.querySelector('pw-settings select')?.value === 'tiny'")
        view.ask("Hi")
        view.until_answered()
        assert view.answer == server.model.text
        assert "secret-key" not in " ".join(view.requests)
        assert view.page.evaluate("Object.values(localStorage).join()").find("secret") < 0


@full
def test_a_server_that_dies_is_shown_and_its_return_is_noticed(browser: Browser) -> None:
    with scripted_server() as server, console(browser, server.url) as view:
        view.open()
        server.model.holds = True
        view.ask("Hi")
        view.page.locator("pw-turn.assistant strong").wait_for()
        view.page.route("**/*", lambda route: route.abort())
        server.cut_connections()
        view.page.get_by_text("cannot be reached", exact=False).first.wait_for()
        view.until_answered()
        assert view.page.get_by_role("button", name="Try again").is_visible()
        view.page.unroute_all()
        server.model.holds = False
        view.page.locator(".health[data-state=ready]").wait_for()
        view.page.get_by_role("button", name="Try again").click()
        view.page.locator(".figures", has_text="tokens").wait_for()


@full
def test_a_broken_event_stream_is_shown_and_opened_again(view: Console, server: ScriptedServer) -> None:
    view.page.get_by_role("link", name="Pipeline", exact=True).click()
    view.page.locator(".instance[data-state=ready]").first.wait_for()
    problem = view.page.get_by_text("The event stream has ended")
    view.page.route("**/console/events", lambda route: route.abort())
    server.cut_connections()
    problem.wait_for()
    view.page.unroute_all()
    problem.wait_for(state="detached")
    view.page.locator(".instance[data-state=ready]").first.wait_for()


@full
@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_nothing_is_wider_than_the_screen(browser: Browser, server: ScriptedServer, width: int) -> None:
    server.model.text = (
        "A " + "long" * 200 + " word, ```\n" + "x" * 400 + "\n```\n\n| " + "wide | " * 40 + "\n|" + " - |" * 40
    )
    with console(browser, server.url, width) as view:
        view.open()
        view.ask("long" * 100)
        view.until_answered()
        for address in ("#/", "#/pipeline"):
            view.page.evaluate(f"location.hash = '{address}'")
            view.page.wait_for_timeout(500)
            assert view.page.evaluate("document.documentElement.scrollWidth") <= width
