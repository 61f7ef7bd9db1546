import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.model_folder import BUNDLED
from pagewire.shared.tokenizer import load_tokenizer
from tests.support.model_folders import SIMPLE_TEMPLATE, change, model_folder


def test_the_bundled_tokenizer_reads_what_it_writes() -> None:
    tokenizer = load_tokenizer(BUNDLED)
    text = "Once upon a time, naïve 猫 🦊\n"
    assert tokenizer.decode(tokenizer.backend_tokenizer.encode(text).ids) == text


def test_a_template_file_beside_the_tokenizer_is_found(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=SIMPLE_TEMPLATE)
    assert load_tokenizer(folder).chat_template == SIMPLE_TEMPLATE


def test_a_template_in_the_configuration_is_found(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    change(folder / "tokenizer_config.json", chat_template=SIMPLE_TEMPLATE)
    assert load_tokenizer(folder).chat_template == SIMPLE_TEMPLATE


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    tokenizer = load_tokenizer(folder).backend_tokenizer
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert 3 < len(load_tokenizer(folder).backend_tokenizer.encode("one two three four five").ids) != 9


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def empty(path: Path) -> None:
    path.write_text("{}")


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x01")


@pytest.mark.parametrize("harm", [remove, cut, empty, binary])
def test_a_broken_tokenizer_is_told_in_one_line(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = model_folder(tmp_path / "m")
    harm(folder / "tokenizer.json")
    with pytest.raises(ConfigurationError) as caught:
        load_tokenizer(folder)
    assert "tokenizer" in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_is_told_in_one_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    cut(folder / "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigurationError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_the_service_starts_without_torch() -> None:
    program = "import sys, pagewire.services.tokenizer.service; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
