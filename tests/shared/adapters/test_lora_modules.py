"""`--lora-modules` in all of its forms."""

from typing import Any

import pytest

from pagewire.commands import parser
from pagewire.shared.adapters.lora_modules import LoraModule, lora_modules
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings

A, B = LoraModule("a", "/x"), LoraModule("b", "/y", "m")
OBJECT = '{"name": "b", "path": "/y", "base_model_name": "m"}'


def settings(text: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {"model": "m", "enable_lora": True, "lora_modules": text}
    return Settings(**values | changes)


@pytest.mark.parametrize("text", [f"a=/x,{OBJECT}", f" a=/x , {OBJECT} ", f'[{{"name": "a", "path": "/x"}}, {OBJECT}]'])
def test_pairs_and_objects_may_be_mixed(text: str) -> None:
    assert lora_modules(settings(text)) == [A, B]


def test_the_flag_takes_several_values_and_leaves_the_model() -> None:
    words = ["serve", "--enable-lora", "--lora-modules", "a=/x", OBJECT, "m"]
    (read,) = flags.read_models(parser.build_parser().parse_args(words))
    assert (read.model, lora_modules(read)) == ("m", [A, B])


BAD = {
    "a": "write name=path",
    "=x": "write name=path",
    "a=": "write name=path",
    "{": "no list of adapters in JSON",
    "[1]": "no list of adapters in JSON",
    '{"name": "a"}': "no list of adapters in JSON",
    '{"name": "a", "path": "/x", "rank": 1}': "no list of adapters in JSON",
    "a=/x,a=/y": "have one subject",
    "a.b=/x,a_b=/y": "have one subject",
    "m=/x": "have one subject",
    "a b=/x": "no name of an adapter",
    '{"name": "a", "path": "/x", "base_model_name": "other"}': "is for other",
}


@pytest.mark.parametrize("text", BAD)
def test_unusable_lora_modules_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=BAD[text]):
        lora_modules(settings(text))
