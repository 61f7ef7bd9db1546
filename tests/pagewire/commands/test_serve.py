"""A model that is added to a running stack has paths that do not depend on where the command was given."""

import json
from pathlib import Path

import pytest

from pagewire.commands.serve import _with_whole_paths
from pagewire.shared.adapters.lora_modules import parse
from pagewire.shared.settings.config import Settings


def test_all_paths_of_an_added_model_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    settings = _with_whole_paths(
        Settings(
            model="model",
            enable_lora=True,
            lora_modules="sql=./sql,chat=/chat",
            lora_dirs="adapters,/others",
            speculative_config=json.dumps({"method": "draft_model", "model": "draft"}),
        )
    )
    assert settings.model == str(tmp_path / "model")
    assert [module.path for module in parse(settings.lora_modules)] == [str(tmp_path / "sql"), "/chat"]
    assert settings.lora_dirs == f"{tmp_path / 'adapters'},/others"
    assert json.loads(settings.speculative_config)["model"] == str(tmp_path / "draft")


def test_a_name_of_a_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(model="org/name", speculative_config=json.dumps({"method": "draft_model", "model": "bundled"}))
    assert _with_whole_paths(settings) == settings
