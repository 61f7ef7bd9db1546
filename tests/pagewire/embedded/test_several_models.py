"""One stack with several models, as its users start it."""

import os
import random
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress

import openai
import pytest

from pagewire import Client, SamplingParams
from pagewire.shared.errors import ModelNotFound
from tests.pagewire.serving import Served, run, serving
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE, until
from tools.experiments.faults.several_models import PROMPTS, clients, send

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SMALL = ("--device", "cpu", "--max-model-len", "96", "--num-kv-blocks", "64")
PROMPT = "the little house"


@pytest.fixture(scope="module")
def stack() -> Iterator[Served]:
    models = ("bundled", str(checkpoint("qwen3")), "--served-model-name", "stories", "qwen3")
    with serving(*models, *SMALL) as served:
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


def text(client: Client, model: str) -> str:
    return client.generate(PROMPT, GREEDY, model=model).choices[0].text


def test_one_command_serves_several_models(stack: Served) -> None:
    assert stack.models == ("stories", "qwen3")
    assert len(stack.processes()) >= 2 * 4 + 2  # other tests add models and unload them
    with Client(stack.nats) as client, openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none") as http:
        assert {info.name for info in client.models()} >= {"stories", "qwen3"}
        assert {model.id for model in http.models.list()} >= {"stories", "qwen3"}
        texts = {name: text(client, name) for name in ("stories", "qwen3")}
        assert texts["stories"] != texts["qwen3"]
        for name, expected in texts.items():
            done = http.completions.create(
                model=name, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
            )
            assert done.choices[0].text == expected
        with pytest.raises(ModelNotFound, match="stories"):
            text(client, "other")


async def test_requests_at_random_through_every_client_get_the_text_of_their_model(stack: Served) -> None:
    async with AsyncExitStack() as closing:
        asks = await clients(closing, [stack.http], stack.nats)
        ask = asks["pagewire.Client"]
        texts = {model: [await ask(model, prompt) for prompt in PROMPTS] for model in ("stories", "qwen3")}
        for ask in asks.values():
            assert await send(ask, texts, 24, random.Random(0)) == (24, [])


async def test_a_killed_model_comes_back_and_the_other_one_goes_on(stack: Served) -> None:
    with Client(stack.nats) as client:
        before = text(client, "qwen3")
        executors, killed = stack.find_all("executor"), stack.service("executor", "qwen3")
        os.kill(killed, signal.SIGKILL)
        assert text(client, "stories")
        assert text(client, "qwen3") == before, "the request waited for the executor"
        await until(lambda: stack.find_all("executor") - executors)


def port(stack: Served) -> str:
    return stack.http.rpartition(":")[2]


def health(stack: Served, query: str = "") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{stack.http}/health{query}", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_a_model_is_added_to_a_running_stack_and_unloaded_while_it_is_idle(stack: Served) -> None:
    name, executors = "added", stack.find_all("executor")
    flags = (str(checkpoint("llama")), "--served-model-name", name, "--port", port(stack), *SMALL)
    done = run("serve", "--add", *flags, "--idle-unload", "3s")
    assert (done.returncode, done.stdout) == (0, f"ready {name}\n"), done.stderr
    with Client(stack.nats) as client:
        assert name in {info.name for info in client.models()}
        added = text(client, name)
        own = stack.find_all("executor") - executors  # on a busy machine the model may be unloaded already
        assert added != text(client, "stories")
    assert health(stack, f"?model={name}") == (200, "ready")
    lines = run("status", "--nats-url", stack.nats).stdout.splitlines()
    assert lines[1].split()[0] == name
    assert [line.split()[:3] for line in lines[2:4]] == [[model, "ready", "1"] for model in ("qwen3", "stories")]
    assert "detokenizer=1 executor=1 scheduler=1 tokenizer=1" in lines[2]
    await until(lambda: not own & stack.find_all("executor"))
    assert health(stack, f"?model={name}") == (200, "ready")
    assert run("status", "--nats-url", stack.nats).stdout.splitlines()[1].split()[:3] == [name, "unloaded", "0"]
    with Client(stack.nats) as client:
        assert text(client, name) == added, "the request has loaded the model"
    again = run("serve", "--add", *flags)
    assert again.returncode == 2
    assert f"two models are called {name}" in again.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("/nowhere",), "there is no folder /nowhere"),
        (("bundled", "--max-model-len", "100000"), "exceeds the model's context"),
        (("bundled", "--kv-cache-memory", "4000GiB"), "and .* GB are free"),
        (("bundled", "--api-key", "k"), "--api-key is a setting of the whole stack"),
        (("bundled", "--port", "1"), "no `pagewire serve` of this user has the HTTP port 1"),
    ],
)
def test_a_model_that_cannot_be_added_harms_nothing(stack: Served, flags: tuple[str, ...], reason: str) -> None:
    own_port = () if "--port" in flags else ("--port", port(stack))
    done = run("serve", "--add", *flags, "--device", "cpu", *own_port)
    assert done.returncode in (1, 2)
    assert re.search(reason, done.stderr), done.stderr
    with Client(stack.nats) as client:
        assert "bundled" not in {info.name for info in client.models()}
        assert text(client, "stories")


async def test_a_model_that_has_gone_is_refused_at_once_and_the_others_are_served(stack: Served) -> None:
    with Client(stack.nats) as client:
        tokenizer = stack.service("tokenizer", "qwen3")
        os.kill(tokenizer, signal.SIGSTOP)
        try:
            await until(lambda: health(stack, "?model=qwen3")[0] == 503)
            assert health(stack)[0] == 200
            assert "qwen3: no tokenizer is running" in health(stack)[1]
            assert text(client, "stories")
        finally:
            with suppress(ProcessLookupError):  # the supervisor has killed it
                os.kill(tokenizer, signal.SIGKILL)
        await until(lambda: health(stack, "?model=qwen3")[0] == 200)
        assert health(stack, "?model=nobody")[0] == 404
        assert text(client, "qwen3")


def test_models_too_large_for_the_memory_are_refused_before_the_start() -> None:
    done = run("serve", "bundled", str(checkpoint("qwen3")), "--device", "cpu", "--kv-cache-memory", "4000GiB")
    assert done.returncode == 2
    assert "bundled at least 4295" in done.stderr
    assert "are free" in done.stderr
    assert "kv_pool" not in done.stderr


def test_two_models_of_one_name_are_refused() -> None:
    done = run("serve", "bundled", "bundled")
    assert done.returncode == 2
    assert "two models are called bundled" in done.stderr
