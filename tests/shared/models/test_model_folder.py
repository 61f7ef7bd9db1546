import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.models.model_folder import (
    BUNDLED,
    eos_ids,
    folder_of,
    max_model_len,
    read_config,
    read_generation_config,
    resolve,
    revision,
    served_name,
    tokenizer_folder,
    weight_files,
)
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.settings.config import Settings

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
"""Rotary parameters in the form in which Qwen2.5's model card adds them to config.json."""


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    write(path / "config.json", {"max_position_embeddings": 64, "eos_token_id": 2})
    return path


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


class Hub:
    """Stands in for the hub's download."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: Path) -> None:
        self.asked: list[tuple[str, bool]] = []
        """Id of each model, and whether its weights are downloaded."""
        self.revisions: list[str] = []
        self._result = result
        monkeypatch.setattr(model_folder, "download", self.download)

    def download(self, model: str, revision: str, *, weights: bool, stop: object) -> Path:
        self.asked.append((model, weights))
        self.revisions.append(revision)
        return self._result


def test_the_bundled_model_has_a_name() -> None:
    assert resolve("bundled") == BUNDLED
    assert served_name(Settings(model="bundled")) == "bundled"


def test_a_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("tiny") == folder
    monkeypatch.chdir(folder)
    assert resolve(".") == folder
    assert served_name(Settings(model=".")) == "tiny"
    assert served_name(Settings(model=str(folder) + "/")) == "tiny"


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "a/b/c", "~/none", "org/", "../x", "my model"])
def test_a_missing_folder_is_an_error_without_asking_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = Hub(monkeypatch, Path("/unused"))
    message = refused(lambda: resolve(model))
    assert model in message
    assert "hub id" in message
    assert hub.asked == []


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "config.json" in refused(lambda: resolve(str(folder / "config.json")))


def test_a_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, folder)
    assert resolve("org/tiny-1.5B") == folder
    assert hub.asked == [("org/tiny-1.5B", True)]
    assert served_name(Settings(model="org/tiny-1.5B")) == "org/tiny-1.5B"


def test_only_a_hub_id_has_a_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, folder)
    assert folder_of(Settings(model="org/name", revision="v2")) == folder
    assert hub.revisions == ["v2"]
    for model in (str(folder), "bundled", "", "model.gguf"):
        with pytest.raises(ConfigurationError, match="leave revision out"):
            folder_of(Settings(model=model, revision="v2"))


def test_random_weights_and_tokenizers_need_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, folder)
    folder_of(Settings(model="org/name", load_format="dummy"))
    tokenizer_folder(Settings(model="bundled", tokenizer="org/words"))
    assert [name for name, _ in hub.asked] == ["org/name", "org/words"]
    assert not any(weights for _, weights in hub.asked)


def test_the_tokenizer_is_the_model_s_unless_it_is_set(folder: Path) -> None:
    assert tokenizer_folder(Settings(model="bundled")) == BUNDLED
    assert tokenizer_folder(Settings(model="bundled", tokenizer=str(folder))) == folder


def test_a_configured_name_is_the_name() -> None:
    assert served_name(Settings(model="org/tiny", served_model_name="mine")) == "mine"


def test_the_configuration_is_read(folder: Path) -> None:
    assert read_config(folder)["max_position_embeddings"] == 64
    assert read_config(BUNDLED)["model_type"] == "llama"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"7", b"\xff\xfe", b'{"a": }'])
def test_a_broken_configuration_is_an_error_of_one_line(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    for read in (read_config, eos_ids, revision):
        assert "config.json" in refused(lambda read=read: read(folder))  # type: ignore[misc]


def test_a_missing_configuration_is_an_error_of_one_line(tmp_path: Path) -> None:
    assert "has no config.json" in refused(lambda: read_config(tmp_path))
    assert "has no config.json" in refused(lambda: revision(tmp_path))


def test_an_unreadable_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "cannot read" in refused(lambda: read_config(tmp_path))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, set()),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 4}, {2, 3, 4}),
        ({}, {"eos_token_id": [5, 5, 0]}, {0, 5}),
        ({"eos_token_id": [2, 7], "vocab_size": 7}, {"eos_token_id": 9}, {2}),
    ],
)
def test_the_ends_of_both_files_count(folder: Path, config: Any, generation: Any, expected: set[int]) -> None:
    write(folder / "config.json", config)
    if generation is not None:
        write(folder / "generation_config.json", generation)
    assert eos_ids(folder) == expected


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
@pytest.mark.parametrize("listed", [True, False])
def test_the_end_that_the_tokenizer_names_counts(folder: Path, eos: Any, *, listed: bool) -> None:
    write(folder / "config.json", {"eos_token_id": 2})
    tokens = {"2": {"content": "</s>"}, "7": {"content": "<|im_end|>"}}
    write(folder / "tokenizer_config.json", {"eos_token": eos} | ({"added_tokens_decoder": tokens} if listed else {}))
    write(folder / "tokenizer.json", {"added_tokens": [{"id": int(id_)} | token for id_, token in tokens.items()]})
    assert eos_ids(folder) == {2, 7}


@pytest.mark.parametrize("value", ["</s>", 1.5, True, -1, [1, "x"], {"id": 1}])
def test_ends_that_are_no_tokens_are_refused(folder: Path, value: object) -> None:
    write(folder / "generation_config.json", {"eos_token_id": value})
    assert "generation_config.json has an eos_token_id" in refused(lambda: eos_ids(folder))


@pytest.mark.parametrize(
    ("configured", "config", "expected"),
    [
        (None, {"max_position_embeddings": 64}, 64),
        (None, {"n_positions": 1024}, 1024),
        (10, {"max_position_embeddings": 64}, 10),
        (64, {"max_position_embeddings": 64}, 64),
        (10, {}, 10),
        (None, {"max_position_embeddings": 64, "rope_scaling": YARN}, 256),
        (200, {"max_position_embeddings": 64, "rope_scaling": YARN}, 200),
        (None, {"max_position_embeddings": 256, "rope_parameters": YARN}, 256),
        (None, {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 128),
        (None, {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        (None, {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": "x"}}, 64),
    ],
)
def test_the_context_is_the_setting_or_the_models_own(
    configured: int | None, config: dict[str, Any], expected: int
) -> None:
    assert max_model_len(Settings(max_model_len=configured), config) == expected


def test_an_impossible_context_is_refused() -> None:
    assert "at most 64" in refused(lambda: max_model_len(Settings(max_model_len=65), {"max_position_embeddings": 64}))
    assert "at least 1" in refused(lambda: max_model_len(Settings(max_model_len=0), {"max_position_embeddings": 64}))
    assert "set max-model-len" in refused(lambda: max_model_len(Settings(), {}))


def test_the_revision_follows_configuration_and_weight_files(folder: Path) -> None:
    revisions = {revision(folder)}
    (folder / "model.safetensors").write_bytes(b"1234")
    revisions.add(revision(folder))
    (folder / "model.safetensors").write_bytes(b"12345")
    revisions.add(revision(folder))
    write(folder / "config.json", {"max_position_embeddings": 65})
    revisions.add(revision(folder))
    assert len(revisions) == 4
    assert all(len(digest) == 12 for digest in revisions)
    (folder / "notes.txt").write_text("x")
    assert revision(folder) in revisions


def test_copies_of_the_weights_in_another_format_do_not_count(folder: Path) -> None:
    parts = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file in (*parts, folder / "consolidated.safetensors", folder / "other.safetensors"):
        file.write_bytes(b"1")
    assert set(weight_files(folder)) == {*parts, folder / "other.safetensors"}
    write(folder / "model.safetensors.index.json", {"weight_map": {"a": parts[0].name, "b": parts[1].name}})
    assert weight_files(folder) == parts
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"1")
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_the_home_of_nobody_is_no_model() -> None:
    assert "there is no folder ~nobody-at-all/m" in refused(lambda: resolve("~nobody-at-all/m"))


def test_the_bundled_model_is_complete() -> None:
    assert model_folder.BUNDLED.is_dir()
    assert eos_ids(BUNDLED)
    assert max_model_len(Settings(), read_config(BUNDLED)) >= 1024


def test_a_named_model_samples_as_its_publisher_does() -> None:
    assert read_generation_config(DEFAULT.path) == {"temperature": 0.2, "top_p": 0.9}
    assert read_generation_config(DEFAULT.path.with_name("other.gguf")) == {}
