from pathlib import Path

import pytest

from pagewire.shared.adapters.lora_modules import parse
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import config
from pagewire.shared.settings.config import Settings, seconds
from pagewire.shared.settings.environment import variable


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 0.5), ("10s", 10.0), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), ("0s", 0.0)]
)
def test_a_duration_is_a_number_with_its_unit(text: str, expected: float) -> None:
    settings = config.load({"max-queue-wait": text}, environ={})
    assert settings.max_queue_wait is not None
    assert seconds(settings.max_queue_wait) == pytest.approx(expected)
    assert config.load({}, environ=config.to_environment(settings)) == settings


@pytest.mark.parametrize("text", ["10", "s", "10 s", "-1s", "10sec", "1m30s", ""])
def test_an_invalid_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"max-queue-wait is {text!r}\. Expected .*10s") as refused:
        config.load({"max-queue-wait": text}, environ={})
    assert "regex" not in str(refused.value)


def test_a_key_is_not_shown_when_a_file_has_it_as_a_number() -> None:
    with pytest.raises(ConfigurationError, match="api-key is a value") as refused:
        config.load({"api-key": 271828}, environ={})
    assert "271828" not in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [("port", ""), ("port", "99999"), ("max-num-seqs", "many"), ("dtype", "x")])
def test_an_invalid_value_is_shown_beside_its_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value!r}. (Expected|Invalid)") as refused:
        config.load({}, environ={variable(name): value})
    assert "$" not in str(refused.value)


def test_the_wait_is_unbounded_by_default() -> None:
    assert Settings().max_queue_wait is None


TABLES = """
max-num-seqs = 8
block-size = 8

[models."org/large"]
max-num-seqs = 2
served-model-name = ["large", "big"]

[models.small]
"""


def models(tmp_path: Path, text: str, *named: str, **flags: object) -> list[Settings]:
    file = tmp_path / "pagewire.toml"
    file.write_text(text)
    return config.load_models(named, {name.replace("_", "-"): value for name, value in flags.items()}, {}, file)


def test_a_file_has_settings_for_all_models_and_a_table_for_each(tmp_path: Path) -> None:
    large, small = models(tmp_path, TABLES)
    assert (large.model, large.max_num_seqs, large.block_size, large.served_model_name) == (
        "org/large",
        2,
        8,
        "large,big",
    )
    assert (small.model, small.max_num_seqs, small.block_size, small.served_model_name) == ("small", 8, 8, "")


def test_flags_beat_the_table_of_a_model(tmp_path: Path) -> None:
    assert [each.max_num_seqs for each in models(tmp_path, TABLES, max_num_seqs=5)] == [5, 5]


def test_a_table_counts_only_for_its_model(tmp_path: Path) -> None:
    small, large = models(tmp_path, TABLES, "small", "org/large")
    assert (small.max_num_seqs, large.max_num_seqs) == (8, 2)
    assert config.load({}, {}, tmp_path / "pagewire.toml").max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "named", "reason"),
    [
        ("[models.smal]", ["small"], "smal is of no .* did you mean small"),
        ("[models.small]\nport = 1", [], "port is the same for all models"),
        ("[models.small]\nmodel = 'x'", [], "model is the same for all models"),
        ("[models.small]\nmax-seqs = 1", [], "no setting 'max-seqs'"),
        ("models = ['small']", [], "write .models"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, named: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        models(tmp_path, text, *named)


def test_the_settings_of_a_stack_are_settings() -> None:
    assert config.FIELDS.keys() > config.STACK_WIDE


def test_the_last_alias_is_the_model_only_where_nothing_else_names_one(tmp_path: Path) -> None:
    file = tmp_path / "pagewire.toml"
    file.write_text("model = 'org/large'")
    assert config.names_model({}, {}, file)
    assert config.names_model({}, {variable("model"): "org/large"})
    assert not config.names_model({"served-model-name": "a,b"}, {})


def test_a_list_of_tables_is_one_of_objects(tmp_path: Path) -> None:
    (alone,) = models(tmp_path, "lora-modules = [{name = 'a', path = '/a'}, 'b=/b']")
    assert [module.name for module in parse(alone.lora_modules)] == ["a", "b"]


def test_a_number_as_the_name_of_several_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="served-model-name"):
        models(tmp_path, "served-model-name = 7", "a", "b")
