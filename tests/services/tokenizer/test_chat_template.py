from pathlib import Path

import jinja2
import pytest

from pagewire.services.tokenizer.chat_template import render
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage
from pagewire.shared.tokenizer import load_tokenizer
from tests.support.model_folders import SIMPLE_TEMPLATE, TEMPLATES, model_folder

HELLO = [ChatMessage("user", "Hello!")]
TALK = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Hello!"),
    ChatMessage("assistant", "Hi."),
    ChatMessage("user", "Who are you? <b>&amp;</b>"),
]


def rendered(tmp_path: Path, template: str, messages: list[ChatMessage]) -> str:
    return render(load_tokenizer(model_folder(tmp_path / "m", template=template)), messages)


def template(name: str) -> str:
    (found,) = TEMPLATES.glob(f"*{name}*.jinja")
    return found.read_text()


def test_turns_are_laid_out_and_the_assistant_is_next(tmp_path: Path) -> None:
    text = rendered(tmp_path, SIMPLE_TEMPLATE, TALK)
    assert text == ("<system>Be brief.\n<user>Hello!\n<assistant>Hi.\n<user>Who are you? <b>&amp;</b>\n<assistant>")


def test_qwen2_5(tmp_path: Path) -> None:
    assert rendered(tmp_path, template("Qwen2.5"), TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWho are you? <b>&amp;</b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen2_5_says_who_it_is_unless_told(tmp_path: Path) -> None:
    assert rendered(tmp_path, template("Qwen2.5"), HELLO).startswith("<|im_start|>system\nYou are Qwen")


def test_qwen3(tmp_path: Path) -> None:
    text = rendered(tmp_path, template("Qwen3"), HELLO)
    assert text == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_smollm3(tmp_path: Path) -> None:
    text = rendered(tmp_path, template("SmolLM3"), TALK)
    assert "Be brief." in text
    assert text.index("Hello!") < text.index("Hi.") < text.index("Who are you?")
    assert text.rstrip().endswith("<|im_start|>assistant")


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template: send a prompt"):
        render(load_tokenizer(model_folder(tmp_path / "m")), HELLO)


def test_the_templates_own_refusal_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        rendered(tmp_path, "{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    "broken",
    [
        "{{ messages[5].content }}",
        "{{ nothing.at.all }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{{ [][3:].pop() }}",
        "{{ {}['key'] }}{{ ''.index('x') }}",
    ],
)
def test_a_template_that_fails_is_a_refusal_without_its_insides(tmp_path: Path, broken: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(tmp_path, broken, HELLO)
    message = caught.value.message
    assert message.startswith("the model's chat template does not take these messages: ")
    assert "Traceback" not in message
    assert "/" not in message
    assert not isinstance(caught.value, jinja2.TemplateError)
