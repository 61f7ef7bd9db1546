import json
import re

import pytest

from pagewire.bench import quality
from pagewire.bench._common.output import CHECKOUT
from pagewire.bench.quality import Question, Run, differences, read_questions, table
from pagewire.shared.models.named_models import DEFAULT
from tests.support.default_model import default_model

RECORDED = CHECKOUT / "bench" / "results" / "quality.json"


def run(side: str, *token_ids: list[int], right: list[bool]) -> Run:
    return Run(side, [""] * len(token_ids), list(token_ids), right)


def test_there_are_forty_questions_whose_answers_can_be_checked() -> None:
    questions = read_questions()
    assert len({question.question for question in questions}) == len(questions) == 40
    for question in questions:
        assert bool(question.accepts) != (question.json is not None), question
        for pattern in question.accepts:
            re.compile(pattern)
        assert not question.is_right(""), question
        assert not question.is_right(question.question), f"the question itself would be a right answer: {question}"


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        (Question("?", [r"\bParis\b"]), "It is paris.", True),
        (Question("?", [r"\bParis\b"]), "It is Parisian.", False),
        (Question("?", [r"\b7\b", r"\bseven\b"]), "Seven days", True),
        (Question("?", [r"(?-i:\bHELLO\b)"]), "Hello", False),
        (Question("?", json=[1, 2]), "[1,2]", True),
        (Question("?", json={"a": "b"}), 'Here it is:\n```json\n{"a": "b"}\n```', True),
        (Question("?", json={"a": "b"}), '{"a": "b", "c": 1}', False),
        (Question("?", json={"a": "b"}), '{"a": "b"', False),
    ],
)
def test_answers_are_checked(question: Question, answer: str, right: bool) -> None:
    assert question.is_right(answer) is right


def test_the_table_has_right_answers_and_equal_tokens() -> None:
    questions = [Question("one?"), Question("two?"), Question("three?")]
    ours = run("auto", [1, 2], [3, 4], [5], right=[True, False, False])
    theirs = run("transformers", [1, 2], [3, 9], [5, 6], right=[True, True, False])
    assert table([ours], theirs)[2:] == [
        "| auto | 1 of 3 | 33.3% | 1 of 3 |  |",
        "| transformers | 2 of 3 | 66.7% | 3 of 3 |  |",
    ]
    assert table([ours], None)[2:] == ["| auto | 1 of 3 | 33.3% |  |  |"]
    assert differences(questions, [ours], theirs) == [
        "auto differs from token 1 on: two?",
        "auto differs from token 1 on: three?",
    ]


def test_the_table_has_perplexities_relative_to_the_first() -> None:
    runs = [Run("float32", [], [], [True], 20.0), Run("int8", [], [], [True], 20.1)]
    assert table(runs, None)[2:] == [
        "| float32 | 1 of 1 | 100.0% |  | 20.000 (+0.00%) |",
        "| int8 | 1 of 1 | 100.0% |  | 20.100 (+0.50%) |",
    ]


def test_each_kind_of_weights_has_a_stack_for_each_kv_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides: list[tuple[str, str, str]] = []

    def served(_model: str, questions: list[Question], weights: str, cached: str, device: str) -> Run:
        sides.append((weights, cached, device))
        return run(f"{weights} {cached}", *[[]] * len(questions), right=[True] * len(questions))

    monkeypatch.setattr(quality, "served", served)
    assert quality.main(["--weights", "bfloat16", "int8", "--kv-cache-dtype", "auto", "int8", "--device", "cpu"]) == 0
    assert sides == [(weights, cached, "cpu") for weights in ("bfloat16", "int8") for cached in ("auto", "int8")]
    assert "| int8 int8 | 40 of 40 |" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.alone
def test_the_default_model_answers_as_recorded_and_as_transformers_does() -> None:
    assert default_model().is_file()
    questions = read_questions()
    ours = quality.served(DEFAULT.name, questions, "float32")
    reference = quality.referred(DEFAULT.name, questions)
    assert differences(questions, [ours], reference) == []
    recorded = {run["side"]: run["right"] for run in json.loads(RECORDED.read_text())["runs"]}
    assert sum(ours.right) == sum(reference.right) == recorded["float32"]
    assert ours.perplexity == pytest.approx(reference.perplexity, rel=1e-3)
