"""The chat as its users have it: a program on a terminal or in a pipe, before a stack with the bundled model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pagewire.commands.chat.keyboard import ALT_ENTER, CTRL_C, CTRL_D, ENTER, Keyboard, chatting
from tests.pagewire.serving import COMMAND, Served, serving

SHORT = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    with serving("--model", "bundled", "--max-num-seqs", "4") as served:
        yield served


@pytest.fixture
def keyboard(stack: Served, tmp_path: Path) -> Iterator[Keyboard]:
    with chatting("--nats-url", stack.nats, *SHORT, XDG_STATE_HOME=str(tmp_path)) as keyboard:
        keyboard.expect("bundled. /help lists the commands, Ctrl-D or /exit leaves")
        keyboard.prompt()
        yield keyboard
        assert keyboard.wait() == 0


def piped(text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "chat", *arguments], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def saved(keyboard: Keyboard, file: Path) -> list[dict[str, str]]:
    keyboard.type(f"/save {file}{ENTER}")
    keyboard.expect("written to")
    keyboard.prompt()
    messages: list[dict[str, str]] = json.loads(file.read_text())
    return messages


def test_a_conversation_keeps_its_turns(keyboard: Keyboard, tmp_path: Path) -> None:
    keyboard.type(f"/system Be brief.{ENTER}")
    keyboard.expect("the system message is set")
    keyboard.prompt()
    for message in (f"Hello{ENTER}", f'"""two{ENTER}lines"""{ENTER}', f"one{ALT_ENTER}two{ENTER}"):
        keyboard.type(message)
        keyboard.expect(r"time to first token \d+ ms, 8 tokens, [\d.]+ tokens/s; cut at max_tokens")
        keyboard.prompt()
    messages = saved(keyboard, tmp_path / "chat.json")
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3]
    assert messages[0]["content"] == "Be brief."
    assert [message["content"] for message in messages[1::2]] == ["Hello", "two\nlines", "one\ntwo"]
    assert all(message["content"] for message in messages)
    assert "two\n+lines" in (tmp_path / "pagewire" / "chat_history").read_text()
    assert (tmp_path / "pagewire" / "chat_history").stat().st_mode & 0o077 == 0
    keyboard.type(CTRL_D)


def test_ctrl_c_stops_the_answer_but_not_the_program(keyboard: Keyboard, tmp_path: Path) -> None:
    keyboard.type(f"/set max_tokens 1500{ENTER}")
    keyboard.expect("max_tokens: 1500")
    keyboard.prompt()
    keyboard.type(f"Tell me a story{ENTER}")
    keyboard.expect(r"story\s*\r\n\s*\w+")
    keyboard.type(CTRL_C)
    keyboard.expect("stopped")
    keyboard.prompt()
    question, part = saved(keyboard, tmp_path / "chat.json")
    assert (question["content"], part["role"]) == ("Tell me a story", "assistant")
    keyboard.type(CTRL_C)
    keyboard.expect("Ctrl-D or /exit leaves")
    keyboard.prompt()
    keyboard.type(f"/exit{ENTER}")


def test_the_chat_goes_on_after_a_refusal(keyboard: Keyboard, tmp_path: Path) -> None:
    for entered, output in (
        ("/bye", "there is no command /bye"),
        ("/set temperature 9", "temperature must be in"),
        (f"/save {tmp_path}/none/chat.json", "cannot write"),
        ("/set max_tokens 1000000", "max_tokens: 1000000"),
        ("Hello", "1000000"),
    ):
        keyboard.type(entered + ENTER)
        keyboard.expect(output)
        keyboard.prompt()
    assert saved(keyboard, tmp_path / "chat.json") == []
    keyboard.type(CTRL_D)


def test_a_pipe_is_one_message_with_a_plain_answer(stack: Served) -> None:
    done = piped("Hello\nthere\n", "--nats-url", stack.nats, *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith("\n")
    assert piped("Hello\nthere", "--nats-url", stack.nats, *SHORT).stdout == done.stdout
    assert piped("Hello\nthere", "--system", "No.", "--nats-url", stack.nats, *SHORT).stdout != done.stdout


def test_an_empty_pipe_asks_nothing() -> None:
    done = piped(" \n", "--nats-url", "nats://127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_pipe_that_cannot_be_answered_ends_with_one_line() -> None:
    for flag, reason in (("--nats-url=nats://127.0.0.1:1", "127.0.0.1:1"), ("--temperature=-1", "temperature must be")):
        done = piped("Hello", flag)
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_help_does_not_load_the_terminal() -> None:
    code = "import sys, pagewire.cli; print({'rich.markdown', 'prompt_toolkit'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
