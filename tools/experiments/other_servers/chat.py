"""Measures chats over HTTP: the questions of MT-Bench, or other requests, answered by a stack or by another server.

Each client sends a question to /v1/chat/completions, reads the streamed answer to its end, and sends the next question.
Answers are greedy and end where the model ends them. Without `--url` a stack is started for the benchmark; with it any
server that speaks OpenAI's API can be driven. `--against` names a second server, such as llama.cpp's, that answers the
same questions in turn, so that both are measured on the same machine in the same minutes. TTFT is the time to the first
text, TPOT the time per token behind it; both are medians over the requests.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from pagewire.bench import drafts
from pagewire.bench._common.event_stream import post
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

QUESTIONS = Path(__file__).parents[1] / "data" / "mt_bench_question.jsonl"
ANSWER_WITHIN = 600.0
"""Seconds within which an answer must end."""
WARM_UP = 2
"""Requests before anything is counted."""
LEAST = 16
"""Least requests of a round, which has two per client."""


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it."""

    tokens: int
    first: float
    """Seconds to the first text."""
    last: float
    """Seconds to the last text."""

    @property
    def per_token(self) -> float:
        """Seconds per token behind the first."""
        return (self.last - self.first) / (self.tokens - 1)


@dataclass(frozen=True)
class Round:
    """All requests of some clients."""

    clients: int
    seconds: float
    requests: int
    tokens: int
    ttft_ms: float
    """Median milliseconds to the first text."""
    tpot_ms: float
    """Median milliseconds per token, over the answers of more than one token."""
    server: str = "pagewire"
    """Name of the server that answered."""

    @property
    def rate(self) -> float:
        """Tokens per second of all clients together."""
        return self.tokens / self.seconds


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments chat", description=__doc__)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8080 or https://models.example")
    parser.add_argument("--api-key", default="", help="key that the server at --url wants")
    parser.add_argument(
        "--against", metavar="NAME=URL", type=_named, help="a server that is measured in turn with the first"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="mt_bench", help="what is asked")
    parser.add_argument("--model", default=DEFAULT.name, help="model of the stack, or its name at --url")
    parser.add_argument("--dtype", default="auto", help="of the stack's weights")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per number of clients; figures are medians")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--requests", type=int, help=f"per round; default: two per client, at least {LEAST}")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    rounds = asyncio.run(_measure(options))
    print("\n".join(table(rounds)))
    raw = [asdict(each) for each in rounds]
    write(options.output, parser.prog, arguments, model=options.model, workload=options.workload, runs=raw)
    return 0


def table(rounds: Sequence[Round]) -> list[str]:
    """Returns a line per number of clients and server, in Markdown, with the medians of its rounds."""
    rows = []
    for clients, server in product(sorted({each.clients for each in rounds}), _servers(rounds)):
        rate, ttft, tpot = (_median(rounds, server, clients, name) for name in ("rate", "ttft_ms", "tpot_ms"))
        rows.append(f"{server}, {clients} | {rate:.1f} | {ttft:.0f} | {tpot:.1f}")
    return markdown("server, clients | tokens/s | TTFT ms | TPOT ms", rows)


def headline(rounds: Sequence[Round]) -> str:
    """Returns the tokens per second of the first server, relative to the second's, by the number of clients."""
    first, second = _servers(rounds)
    return " / ".join(
        f"{_median(rounds, first, clients, 'rate') / _median(rounds, second, clients, 'rate'):.1f}"
        for clients in sorted({each.clients for each in rounds})
    )


def _servers(rounds: Sequence[Round]) -> list[str]:
    return list(dict.fromkeys(each.server for each in rounds))


def _median(rounds: Sequence[Round], server: str, clients: int, name: str) -> float:
    same = (each for each in rounds if (each.server, each.clients) == (server, clients))
    return float(statistics.median(getattr(each, name) for each in same))


def read_questions() -> list[str]:
    """Returns the first turns of MT-Bench's questions."""
    return [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()]


WORKLOADS: Mapping[str, Callable[[], list[str]]] = {
    "mt_bench": read_questions,
    "code": lambda: [text for text, _ in drafts.code_editing()],
    "quotes": lambda: [text for text, _ in drafts.quotes()],
}
"""Texts of the requests, by what they ask for: answers to the last two repeat much of their prompts."""


async def drive(
    url: str,
    model: str,
    questions: Sequence[str],
    clients: int,
    limit: int,
    api_key: str = "",
    server: str = "pagewire",
) -> Round:
    """Returns the figures of `clients` that ask all questions, each one after the other.

    Raises:
        ConfigurationError: the server cannot be reached, or refuses a request.
    """
    waiting = iter(questions)
    answers: list[Answer] = []

    async def talk() -> None:
        for question in waiting:
            answers.append(await ask(url, model, question, limit, api_key))  # noqa: PERF401 - the questions are shared

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(talk())
    seconds = time.perf_counter() - began
    return Round(
        clients=clients,
        seconds=seconds,
        requests=len(answers),
        tokens=sum(answer.tokens for answer in answers),
        ttft_ms=1000 * statistics.median(answer.first for answer in answers),
        tpot_ms=1000 * statistics.median([answer.per_token for answer in answers if answer.tokens > 1] or [0.0]),
        server=server,
    )


async def ask(url: str, model: str, question: str, limit: int, api_key: str = "") -> Answer:
    """Returns how one question was answered. Tokens are those that the server counts in its usage.

    Raises:
        ConfigurationError: the server cannot be reached, refuses the request, or reports no usage.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": limit,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    try:
        async with (
            asyncio.timeout(ANSWER_WITHIN),
            aclosing(post(f"{url}/v1/chat/completions", body, api_key)) as events,
        ):
            async for event in events:
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    arrivals.append(time.perf_counter() - began)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except TimeoutError as error:
        raise ConfigurationError(f"{url} has not answered within {ANSWER_WITHIN:.0f} s: {question}") from error
    if not tokens or not arrivals:
        raise ConfigurationError(f"{url} has sent no text or no usage for: {question}")
    return Answer(tokens, arrivals[0], arrivals[-1])


async def _measure(options: argparse.Namespace) -> list[Round]:
    questions = cycle(WORKLOADS[options.workload]())
    rounds = []
    try:
        async with _server(options) as first:
            servers = [("pagewire", first), *([options.against] if options.against else [])]
            key = options.api_key
            for _, url in servers:
                await drive(url, options.model, list(islice(questions, WARM_UP)), WARM_UP, 16, key)
            for _, clients in product(range(options.rounds), options.clients):
                turn = _some(questions, clients, options.requests)
                for name, url in servers:
                    rounds.append(await drive(url, options.model, turn, clients, options.max_tokens, key, name))
    except* ConfigurationError as errors:
        raise errors.exceptions[0] from None
    return rounds


def _named(text: str) -> tuple[str, str]:
    """Returns the name and the URL of `NAME=URL`.

    Raises:
        ArgumentTypeError: the text has another form.
    """
    name, equals, url = text.partition("=")
    if not equals or not name or not url:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=URL")
    return name, url.rstrip("/")


def _some(questions: Iterator[str], clients: int, requests: int | None) -> list[str]:
    return list(islice(questions, requests or max(2 * clients, LEAST)))


@asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncIterator[str]:
    if options.url:
        yield options.url.rstrip("/")
        return
    settings: dict[str, Any] = {"model": options.model, "served_model_name": options.model, "dtype": options.dtype}
    async with Stack(Settings(**settings, port=0, nats_port=0, log_level="error")) as stack:
        yield (await stack.ready()).http
