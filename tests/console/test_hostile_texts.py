"""Nothing in a text of a model, of a file or of a tool's arguments runs or loads."""

import json
from pathlib import Path

import pytest

from tests.console.browser import Console
from tests.console.hostile_texts import AWAY, HOSTILE, MARK
from tests.console.scripted_server import ScriptedServer

pytestmark = pytest.mark.full
FORBIDDEN = "script, img, svg:not([class]), iframe, object, embed, link, style, base, meta, form, video, source, math"
"""Elements that no text may become."""


def assert_harmless(view: Console) -> None:
    """Nothing ran, nothing was asked for elsewhere, nothing became an element; the fixture checks the policy's log."""
    view.page.wait_for_timeout(100)
    assert view.page.title() == "Pagewire"
    forbidden = view.page.evaluate(
        f"[...document.querySelectorAll('.thread, pw-requests, pw-conversations')].flatMap((part) =>"
        f" [...part.querySelectorAll({FORBIDDEN!r})]).map((node) => node.outerHTML)"
    )
    assert not forbidden
    assert not view.page.evaluate("[...document.querySelectorAll('.thread [href]')].filter((a) => !a.hash).length")
    assert not view.foreign_requests()
    assert view.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_there_are_forty_hostile_texts() -> None:
    assert len(HOSTILE) >= 40
    assert MARK in HOSTILE[0]
    assert any(AWAY in text for text in HOSTILE)


def test_hostile_texts_of_a_model_are_harmless(view: Console, server: ScriptedServer) -> None:
    for text in HOSTILE:
        server.model.text = text
        view.page.get_by_role("button", name="New conversation").click()
        view.ask(text[:2000].replace("\x00", ""))
        view.until_answered()
        assert view.answer == text.replace("\r", "")
    assert_harmless(view)


def test_a_growing_text_is_shown_like_the_whole_text(view: Console) -> None:
    same = view.page.evaluate(
        """async (texts) => {
            const { MarkdownView } = await import("/console/parts/markdown_view.js");
            return texts.filter((text) => {
                const whole = new MarkdownView(document.createElement("div"));
                whole.show(text);
                const grown = new MarkdownView(document.createElement("div"));
                const step = Math.max(1, Math.floor(text.length / 200));
                for (let end = 1; end < text.length; end += step) grown.show(text.slice(0, end));
                grown.show(text);
                return whole.container.innerHTML !== grown.container.innerHTML;
            });
        }""",
        [
            *HOSTILE,
            "a\n\nb\n- c\n- d\n  e\n\nf\n```py\ng\n\nh\n```\ni\n| j | k |\n|---|---|\n| l | m |\n\nn",
            "- a\n\n- b\n\nc",
            "a\nb|c\n---|---\nd|e\n\nf|g\nh",
            "a\nb|c\n-d\n\ne\n---f\n\ng\n```h`i\nj",
        ],
    )
    assert same == []


def test_hostile_texts_of_a_file_are_harmless(view: Console, tmp_path: Path) -> None:
    turns = {
        str(index): {
            "parent": str(index - 1) if index else "",
            "role": ("user", "assistant", "tool", text)[index % 4],
            "text": text,
            "reasoning": text,
            "error": text,
            "requestId": text,
            "model": text,
            "callId": text,
            "end": text,
            "calls": [{"id": text, "name": text, "arguments": text}],
            "figures": {"tokens": text, text: 1},
            "tokens": [{"text": text, "logprob": text, "likely": [{"text": text, "logprob": 0}]}],
        }
        for index, text in enumerate(HOSTILE)
    }
    conversation = {
        "title": HOSTILE[0],
        "model": HOSTILE[1],
        "system": HOSTILE[2],
        "tools": HOSTILE[3],
        "schema": HOSTILE[4],
        "fields": {HOSTILE[5]: HOSTILE[6], "__proto__": {"polluted": 1}},
        "turns": turns,
        "chosen": {"": "0"},
    }
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps({"format": "pagewire.conversations.v1", "conversations": [conversation]}))
    view.page.locator("input[type=file]").set_input_files(file)
    view.page.locator("pw-turn").first.wait_for()
    assert view.page.locator("pw-turn").count() == len(HOSTILE)
    for tokens in view.page.get_by_role("button", name="Tokens").all()[:5]:
        tokens.click()
    assert not view.page.evaluate("({}).polluted")
    assert_harmless(view)


def test_hostile_arguments_of_a_tool_are_harmless(view: Console, server: ScriptedServer) -> None:
    server.calls_tools()
    view.page.locator("pw-settings summary", has_text="Tools").click()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    view.page.get_by_label("Tools, as a JSON list").fill(json.dumps(tools))
    for text in HOSTILE[:30]:
        call = json.dumps({"name": "f", "arguments": {"text": text}})
        server.model.text = f"<tool_call>\n{call}\n</tool_call>"
        view.page.get_by_role("button", name="New conversation").click()
        view.ask("Call")
        view.until_answered()
        assert view.page.locator(".call pre").count() == 1
    assert_harmless(view)


def test_the_policy_stops_markup_eval_and_images_of_a_faulty_page(view: Console) -> None:
    blocked = view.page.evaluate(
        """(away) => new Promise((resolve) => setTimeout(() => { // a task of the page: the debugger's may use eval
            const failed = [];
            try { document.body.innerHTML = "<b>x</b>"; } catch { failed.push("markup"); }
            try { window.eval("1"); } catch { failed.push("eval"); }
            try { new Function("1"); } catch { failed.push("function"); }
            document.addEventListener("securitypolicyviolation", (event) => {
                if (event.violatedDirective === "img-src") resolve([...failed, "image"]);
            });
            const image = new Image();
            image.onload = () => resolve(failed);
            image.src = away;
        }))""",
        AWAY,
    )
    assert blocked == ["markup", "eval", "function", "image"]
    assert len(view.violations) == len(blocked)
    view.violations.clear()
    view.requests = [url for url in view.requests if url != AWAY]
