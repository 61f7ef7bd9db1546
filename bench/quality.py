"""Asks a model forty short questions, greedily and through all services, and counts the right answers.

The questions have checkable answers: facts, arithmetic, single words, formats. The share shows that a change of
kernels, dtypes or quantization has not harmed what the model says; so does the perplexity of a text, which shows
smaller changes. With `--reference transformers`, transformers answers the same questions on the same weights in
float32, and the tokens and perplexities are compared.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagewire import LLM, SamplingParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._quality.perplexity import TEXT, perplexity, windows
from pagewire.client.async_client import Messages
from pagewire.services.executor.models.config_json import DTYPES
from pagewire.shared.messages.client import Choice
from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.progress import shown
from pagewire.shared.settings.flags import Parser

QUESTIONS = Path(__file__).parent / "data" / "questions.json"
MAX_TOKENS = 64
WEIGHTS = ("float32", "none", "auto")
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
REFERENCE = "transformers"

_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, and what makes an answer right: one of `accepts`, or else `json`."""

    question: str
    accepts: list[str] = []
    """Regular expressions, one of which occurs in the answer; case does not count."""
    json: Any = None
    """The value that the answer, or the code block in it, is as JSON."""

    def is_right(self, answer: str) -> bool:
        """Returns whether an answer is right."""
        if self.accepts:
            return any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.accepts)
        fenced = _FENCED.search(answer)
        try:
            return bool(json.loads(fenced[1] if fenced else answer) == self.json)
        except ValueError:
            return False


@dataclass(frozen=True)
class Run:
    """The answers of one side."""

    side: str
    """Pagewire's weights, and its KV cache if that is set, or the reference."""
    answers: list[str]
    token_ids: list[list[int]]
    """Token ids of each answer, without the token that ends it."""
    right: list[bool]
    perplexity: float | None = None
    """Perplexity of the text in `_quality/perplexity.py`; None: it was not measured."""

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.right)

    def equal(self, other: "Run") -> list[bool]:
        """Returns for each question whether both sides have the same tokens."""
        return [ours == theirs for ours, theirs in zip(self.token_ids, other.token_ids, strict=True)]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = Parser(prog="pagewire bench quality", description=__doc__)
    parser.add_argument("--model", default=DEFAULT.name, help="folder, .gguf file, hub id or short name")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=list(WEIGHTS),
        help="a dtype, or a value of --quantization, such as int8: one stack each",
    )
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], help="values of the setting: one stack each")
    parser.add_argument("--device", default="cpu", help="where Pagewire computes")
    parser.add_argument("--reference", choices=[REFERENCE], help="who answers on the same weights too")
    add_output(parser)
    options = parser.parse_args(arguments)
    questions = read_questions()
    sides = list(itertools.product(options.weights, options.kv_cache_dtype))
    runs = [served(options.model, questions, *side, options.device) for side in shown(sides, "runs")]
    reference = referred(options.model, questions) if options.reference else None
    print("\n".join(table(runs, reference)))
    if reference is not None:
        print("\n".join(differences(questions, runs, reference)))
    both = [*runs, *([reference] if reference else [])]
    rows = [{"side": run.side, "right": sum(run.right), "questions": len(run.right)} | _details(run) for run in both]
    write(options.output, parser.prog, arguments, model=options.model, runs=rows)
    return 0


def read_questions() -> list[Question]:
    """Returns the questions."""
    return msgspec.json.decode(QUESTIONS.read_bytes(), type=list[Question])


def served(
    model: str, questions: Sequence[Question], weights: str, kv_cache_dtype: str = "auto", device: str = "cpu"
) -> Run:
    """Returns what a stack answers that has plain weights of a dtype, or those of a value of `quantization`.

    Raises:
        ConfigurationError: the model or a setting cannot be used.
    """
    plain = {"dtype": weights, "quantization": "none"}
    prompts = windows(model, TEXT.read_text())
    settings = plain if weights in DTYPES else {"quantization": weights}
    with LLM(model, device=device, kv_cache_dtype=kv_cache_dtype, **settings) as llm:
        choices = [result.outputs[0] for result in llm.chat(_conversations(questions), GREEDY)]
        predicted = perplexity(llm, prompts)
    ends = model_folder.eos_ids(model_folder.resolve(model))
    answers = [choice.text for choice in choices]
    token_ids = [_without_end(choice, ends) for choice in choices]
    side = weights if kv_cache_dtype == "auto" else f"{weights}, {kv_cache_dtype} KV"
    return Run(side, answers, token_ids, _right(questions, answers), predicted)


def referred(model: str, questions: Sequence[Question]) -> Run:
    """Returns what transformers answers on the same weights.

    Raises:
        ConfigurationError: the model cannot be used.
    """
    # Transformers' models take seconds to import, and only the reference needs them.
    from pagewire.bench._quality import transformers
    from pagewire.shared.models.tokenizer_files import load_tokenizer

    path = model_folder.resolve(model)
    token_ids = transformers.greedy_answers(path, _conversations(questions), MAX_TOKENS)
    answers: list[str] = load_tokenizer(path).backend.decode_batch(token_ids)
    predicted = transformers.perplexity(path, windows(model, TEXT.read_text()))
    return Run(REFERENCE, answers, token_ids, _right(questions, answers), predicted)


def table(runs: Sequence[Run], reference: Run | None) -> list[str]:
    """Returns a line per side, with its perplexity beside that of the first."""
    rows, first = [], runs[0].perplexity
    for run in [*runs, *([reference] if reference else [])]:
        equal = f"{sum(run.equal(reference))} of {len(run.right)}" if reference else ""
        text = f"{run.perplexity:.3f} ({run.perplexity / first - 1:+.2%})" if run.perplexity and first else ""
        rows.append(f"{run.side} | {sum(run.right)} of {len(run.right)} | {run.share:.1%} | {equal} | {text}")
    return markdown("weights | right | share | tokens equal to the reference's | perplexity", rows)


def summary(raw: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the table of the runs in a raw file, of which the last is the reference."""
    questions = read_questions()
    runs = [
        Run(run["side"], run["answers"], run["token_ids"], _right(questions, run["answers"]), run["perplexity"])
        for run in raw
    ]
    return table(runs[:-1], runs[-1])


def differences(questions: Sequence[Question], runs: Sequence[Run], reference: Run) -> list[str]:
    """Returns a line per answer whose tokens differ from the reference's, with the first position that differs."""
    lines = []
    for run in runs:
        for question, ours, theirs in zip(questions, run.token_ids, reference.token_ids, strict=True):
            if ours != theirs:
                same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
                where = min(len(ours), len(theirs)) if same is None else same
                lines.append(f"{run.side} differs from token {where} on: {question.question}")
    return lines


def _conversations(questions: Sequence[Question]) -> list[Messages]:
    return [[{"role": "user", "content": question.question}] for question in questions]


def _without_end(choice: Choice, ends: frozenset[int]) -> list[int]:
    ended = choice.finish_reason == "stop" and choice.token_ids[-1:] and choice.token_ids[-1] in ends
    return choice.token_ids[:-1] if ended else choice.token_ids


def _right(questions: Sequence[Question], answers: Sequence[str]) -> list[bool]:
    return [question.is_right(answer) for question, answer in zip(questions, answers, strict=True)]


def _details(run: Run) -> dict[str, Any]:
    fields = asdict(run)
    return {name: fields[name] for name in ("answers", "token_ids", "perplexity")}
