"""Scores a model with lm-eval, over HTTP and with its `hf` backend: python tests/clients/lm_eval_client.py URL FOLDER.

The folder has the weights that are served. The tasks are made here: a multiple choice and a generation.
"""

import json
import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "China": "Beijing",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Hungary": "Budapest",
}
TOLERANCE = 1e-3


def tasks(file: Path) -> dict[str, dict[str, Any]]:
    """Returns the tasks over a file of questions."""
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "Question: What is the capital of {{country}}?\nAnswer:",
        "num_fewshot": 0,
    }
    first_city = {"function": "regex", "regex_pattern": f"({'|'.join(CAPITALS.values())})"}
    return {
        "choice": common
        | {
            "task": "capitals_choice",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        },
        "generation": common
        | {
            "task": "capitals_generation",
            "output_type": "generate_until",
            "doc_to_target": "{{capital}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
            "filter_list": [{"name": "first", "filter": [first_city, {"function": "take_first"}]}],
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }


def write_questions(file: Path) -> None:
    """Writes the questions, each with four choices."""
    cities = list(CAPITALS.values())
    with file.open("w") as lines:
        for number, (country, capital) in enumerate(CAPITALS.items()):
            choices = [cities[(number + step) % len(cities)] for step in (1, 3, 5)]
            label = number % 4
            choices.insert(label, capital)
            question = {"country": country, "capital": capital, "choices": choices, "label": label}
            lines.write(json.dumps(question) + "\n")


def evaluate(model: str, arguments: dict[str, Any], task: dict[str, Any], *, chat: bool = False) -> Any:
    """Returns the scores, and what the model has answered to each question."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[dict(task)],
        apply_chat_template=chat,
        log_samples=True,
        bootstrap_iters=0,
    )
    name = task["task"]
    scores = {
        key: value
        for key, value in results["results"][name].items()
        if isinstance(value, float) and "stderr" not in key
    }
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return scores, [sample["resps"] for sample in samples]


def same(left: Any, right: Any) -> bool:
    """Returns whether answers are equal, log-probabilities within the tolerance."""
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return math.isclose(left, right, abs_tol=TOLERANCE) if isinstance(left, float) else bool(left == right)


def main(url: str, folder: str) -> str:
    """Returns the scores. Raises AssertionError when those over HTTP are not those of the other backend."""
    hf = {"pretrained": folder, "dtype": "float32", "device": "cpu", "batch_size": 1}
    served = {
        "model": "smollm2",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "batch_size": 1,
    }
    completions = served | {"base_url": f"{url}/v1/completions"}
    chat = served | {"base_url": f"{url}/v1/chat/completions"}
    shown = []
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "capitals.jsonl")
        write_questions(file)
        questions = tasks(file)
        for model, arguments, kind in (
            ("local-completions", completions, "choice"),
            ("local-completions", completions, "generation"),
            ("local-chat-completions", chat, "generation"),
        ):
            chats = model == "local-chat-completions"
            scores, answers = evaluate(model, arguments, questions[kind], chat=chats)
            theirs, expected = evaluate("hf", hf, questions[kind], chat=chats)
            assert scores == theirs, (model, scores, theirs)
            assert same(answers, expected), (model, answers, expected)
            shown.append(f"{model} {kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    return "; ".join(shown)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(main(*sys.argv[1:]))
