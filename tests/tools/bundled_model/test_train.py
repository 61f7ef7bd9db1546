"""The whole recipe on two tiny books: train, stop, go on, export, measure, sample."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tools.bundled_model import export, measure, train
from tools.bundled_model.__main__ import main
from tools.bundled_model.llama import Llama, Shape
from tools.bundled_model.texts import Book
from tools.bundled_model.train import Run, batches
from tools.bundled_model.vocabulary import end_of_text, train_tokenizer

BOOKS = {
    "cats": Book(["the cat sat on the mat and saw the rat. " * 20] * 4, ["the cat sat on the rat. " * 400]),
    "dogs": Book(["a dog ran in the fog and met a frog. " * 20] * 4, ["a dog met a frog in the fog. " * 10]),
}
TINY = ["--batch-tokens", "64", "--lengths", "32", "--vocab-size", "300", "--dropout", "0"]


@pytest.fixture(autouse=True)
def tiny_books(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, measure):
        monkeypatch.setattr(module, "load_books", lambda: BOOKS)


def run_training(folder: Path, steps: int, save_every: int = 100) -> dict[str, Tensor]:
    main(["train", "--run-dir", str(folder), "--steps", str(steps), "--save-every", str(save_every), *TINY])
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] == steps
    weights: dict[str, Tensor] = saved["model"]
    return weights


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_training(tmp_path / "whole", 6)
    step = train.train_step

    def stopped(run: Run, ids: Tensor, targets: Tensor, rate: float) -> float:
        if run.step == 3:
            raise KeyboardInterrupt
        return step(run, ids, targets, rate)

    monkeypatch.setattr(train, "train_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path / "parts", 6, save_every=2)
    monkeypatch.setattr(train, "train_step", step)
    capsys.readouterr()
    parts = run_training(tmp_path / "parts", 6, save_every=2)
    assert "step 2\n" in capsys.readouterr().out  # from the last checkpoint on
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name


@pytest.mark.full
def test_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    step = train.train_step

    def watched(run: Run, ids: Tensor, targets: Tensor, rate: float) -> float:
        losses.append(step(run, ids, targets, rate))
        return losses[-1]

    monkeypatch.setattr(train, "train_step", watched)
    run_training(tmp_path, 15)
    assert losses[-1] < 0.7 * losses[0]


def test_every_document_comes_once_a_pass_in_an_order_of_its_own() -> None:
    docs = [f"{name} is here." for name in ("cat", "dog", "frog", "rat")]
    tokenizer = train_tokenizer(docs, 280)
    eos, total = end_of_text(tokenizer), sum(1 + len(tokenizer.encode(doc).ids) for doc in docs)
    stream = batches(docs, tokenizer, total, [total], seed=1)
    passes = []
    for ids, targets in itertools.islice(stream, 3):
        assert ids.shape == targets.shape == (1, total)
        assert torch.equal(ids[0, 1:], targets[0, :-1])
        passes.append(tokenizer.decode(ids[0].tolist(), skip_special_tokens=False).split("<|endoftext|>")[1:])
        assert int((ids == eos).sum()) == len(docs)
    assert all(sorted(order) == sorted(docs) for order in passes)
    assert len({tuple(order) for order in passes}) > 1


@pytest.mark.full
def test_an_exported_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run_training(run, 4)
    main(["export", "--run-dir", str(run), "--out", str(out)])
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    capsys.readouterr()
    main(["evaluate", "--model", str(out), "--window", "64", "--stride", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["cats", "dogs", "all"]
    assert all(0 < float(line.split()[1]) < 9 for line in lines[:3])
    assert [line.startswith("positions ") for line in lines[3:]] == [True] * 5


@pytest.mark.full
def test_a_model_that_transformers_reads_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(tmp_path / "run", 2)

    def wrong(shape: Shape) -> Llama:
        model = Llama(shape)
        model.model.embed_tokens.register_forward_hook(lambda *given: given[-1] * 1.5)
        return model

    monkeypatch.setattr(export, "Llama", wrong)
    with pytest.raises(SystemExit, match="differs"):
        main(["export", "--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
