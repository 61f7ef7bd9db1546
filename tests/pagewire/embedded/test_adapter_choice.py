"""The adapters of `--lora-modules` are divided among several models."""

import pytest

from pagewire.embedded.adapter_choice import with_own_adapters
from pagewire.shared.adapters.lora_modules import lora_modules
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings


def names(*texts: str) -> list[list[str]]:
    """The names of the adapters of each of the models a, b, ..., whose `lora_modules` are `texts`."""
    models = [
        Settings(served_model_name=name, enable_lora=True, lora_modules=text)
        for name, text in zip("abc", texts, strict=False)
    ]
    return [[adapter.name for adapter in lora_modules(settings)] for settings in with_own_adapters(models)]


def adapter(name: str, base: str) -> str:
    return f'{{"name": "{name}", "path": "/{name}", "base_model_name": "{base}"}}'


def test_an_adapter_is_one_of_the_model_that_it_names() -> None:
    flag = f"{adapter('x', 'a')},{adapter('y', 'b')},{adapter('z', 'b')}"
    assert names(flag, flag, flag) == [["x"], ["y", "z"], []]


def test_models_may_have_adapters_of_their_own() -> None:
    assert names("x=/x", "y=/y") == [["x"], ["y"]]
    assert names("x=/x,y=/y") == [["x", "y"]]


@pytest.mark.parametrize("texts", [("x=/x", "x=/x"), ("x.y=/x", "x_y=/x"), ("b=/x", ""), ("", "a=/x")])
def test_two_adapters_or_models_of_one_name_are_refused(texts: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="base_model_name"):
        names(*texts)


def test_an_adapter_of_no_served_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="for c, which is not served: choose one of a, b"):
        names(adapter("x", "c"), "")
