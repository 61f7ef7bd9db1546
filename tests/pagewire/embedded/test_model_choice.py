"""Which model is served is decided once: the named one or none, the default one or the bundled one."""

import asyncio
from pathlib import Path

import pytest

from pagewire.embedded.model_choice import added_to, choose_model
from pagewire.shared.adapters.lora_modules import parse
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is here, and pip finds none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_the_bundled_model_replaces_a_default_one_that_cannot_be_fetched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = asyncio.run(choose_model(Settings(max_num_seqs=3)))
    assert (chosen.model, chosen.served_model_name, chosen.max_num_seqs) == (str(BUNDLED), "bundled", 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "instead" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"serving the bundled model instead of the default one: {DEFAULT.name} cannot be fetched"
    )


@pytest.mark.usefixtures("offline")
def test_a_named_model_is_never_replaced() -> None:
    with pytest.raises(ConfigurationError, match=DEFAULT.name):
        asyncio.run(choose_model(Settings(model=DEFAULT.name)))


@pytest.mark.usefixtures("offline")
def test_the_services_get_the_path_and_the_name() -> None:
    chosen = asyncio.run(choose_model(Settings(model="bundled")))
    assert (chosen.model, chosen.served_model_name) == (str(BUNDLED), "bundled")
    named = asyncio.run(choose_model(Settings(model="bundled", served_model_name="mine")))
    assert named.served_model_name == "mine"


@pytest.mark.usefixtures("offline")
def test_the_services_get_the_path_of_the_model_that_drafts() -> None:
    config = '{"model": "bundled", "num_speculative_tokens": 3}'
    chosen = asyncio.run(choose_model(Settings(model="bundled", device="cpu", speculative_config=config)))
    draft = draft_model(chosen)
    assert draft is not None
    assert (draft.model, draft.spec_type) == (str(BUNDLED), "none")
    missing = Settings(model="bundled", device="cpu", speculative_config='{"model": "/nowhere"}')
    with pytest.raises(ConfigurationError, match="/nowhere"):
        asyncio.run(choose_model(missing))


def added(model: Settings, *, adapters: bool, own_broker: bool = True) -> Settings:
    served = Settings(served_model_name="a", enable_lora=adapters, lora_modules="x=/x" if adapters else "")
    return added_to([served], model, own_broker=own_broker)


def test_an_added_model_has_its_own_adapters() -> None:
    text = '{"name": "y", "path": "/y", "base_model_name": "a"}, z=/z'
    model = added(Settings(served_model_name="b", enable_lora=True, lora_modules=text), adapters=True)
    assert [module.name for module in parse(model.lora_modules)] == ["z"]


@pytest.mark.parametrize("name", ["a", "x"])
def test_an_added_model_has_no_name_of_another_model_or_its_adapter(name: str) -> None:
    with pytest.raises(ConfigurationError):
        added(Settings(served_model_name=name), adapters=True)


def test_adapters_need_room_on_the_broker_of_the_stack() -> None:
    model = Settings(served_model_name="b", enable_lora=True)
    with pytest.raises(ConfigurationError, match="--enable-lora"):
        added(model, adapters=False)
    assert added(model, adapters=False, own_broker=False).enable_lora
