import json
from pathlib import Path

import pytest

from pagewire.services.tokenizer.chat.templates import ChatTemplates, find_chat_template
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.support.model_folders import change, model_folder


def found(folder: Path, chosen: str = "") -> ChatTemplates:
    return find_chat_template(load_tokenizer(folder), chosen)


def test_a_template_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, template="{{ messages }}")
    assert found(folder).named == {"default": "{{ messages }}"}


def test_a_template_may_be_a_text_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    change(model_folder(tmp_path) / "tokenizer_config.json", chat_template="{{ a }}", bos_token="<|endoftext|>")
    templates = found(tmp_path)
    assert templates.named == {"default": "{{ a }}"}
    assert templates.special == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def test_a_configuration_may_have_several_templates_by_name(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    change(model_folder(tmp_path) / "tokenizer_config.json", chat_template=several)
    assert found(tmp_path).named == {"default": "{{ a }}", "tool_use": "{{ b }}"}


def test_a_folder_may_have_several_files_of_templates(tmp_path: Path) -> None:
    model_folder(tmp_path, template="{{ a }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ b }}")
    assert found(tmp_path).named == {"default": "{{ a }}", "tool_use": "{{ b }}"}


def test_the_file_comes_before_the_configuration(tmp_path: Path) -> None:
    change(model_folder(tmp_path, template="{{ file }}") / "tokenizer_config.json", chat_template="{{ config }}")
    assert found(tmp_path).named == {"default": "{{ file }}"}


def test_the_setting_comes_before_all(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template="{{ own }}")
    (tmp_path / "chosen.jinja").write_text("{{ chosen }} é\n")
    assert found(folder, str(tmp_path / "chosen.jinja")).named == {"default": "{{ chosen }} é\n"}
    assert found(folder, "{{ inline }}").named == {"default": "{{ inline }}"}


def test_a_setting_that_is_neither_file_nor_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        found(BUNDLED, str(tmp_path / "missing.jinja"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not text"):
        found(BUNDLED, str(tmp_path / "binary"))


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    templates = found(model_folder(tmp_path))
    assert templates.named == {}
    assert templates.choose(tools=False) is None


def test_templates_are_chosen_as_by_transformers() -> None:
    both = ChatTemplates({"default": "a", "tool_use": "b", "rag": "c"}, {})
    assert (both.choose(tools=False), both.choose(tools=True)) == ("default", "tool_use")
    assert ChatTemplates({"default": "a"}, {}).choose(tools=True) == "default"
    assert ChatTemplates({"rag": "c"}, {}).choose(tools=False) is None


def test_the_bundled_model_has_a_template() -> None:
    templates = found(BUNDLED)
    assert set(templates.named) == {"default"}
    assert json.loads((BUNDLED / "tokenizer_config.json").read_text())["eos_token"] == templates.special["eos_token"]
