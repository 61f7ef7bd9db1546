"""The whole stack as users start it, with the bundled model: over HTTP, over NATS, from the terminal."""

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import nats
import openai
import pytest

from pagewire import LLM, Client, SamplingParams, errors
from pagewire.commands import demo
from pagewire.embedded import broker_care
from pagewire.embedded.broker import Broker
from pagewire.embedded.programs import ServiceProgram, describe_replicas
from pagewire.embedded.stack import Stack
from pagewire.shared.models.named_models import BUNDLED, DEFAULT
from pagewire.shared.settings.config import Settings
from tests.pagewire.serving import Served, run, serving
from tests.support.broker import connect_service
from tests.support.processes import alive
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

SMALL = ("--model", "bundled", "--max-model-len", "256", "--num-kv-blocks", "64")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("traces")
    with serving("--trace-dir", str(folder), *SMALL) as served:
        yield served
        started = served.processes()
        assert len(started) >= 6, "the services, the broker, and processes that wait to become services"
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
    assert not any(alive(pid) for pid in started), "something was left behind"


@pytest.fixture(scope="module")
def text(stack: Served) -> str:
    """The model's greedy answer to the prompt, by the shortest way."""
    with Client(stack.nats) as client:
        return client.generate("Once upon a time", GREEDY).choices[0].text


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def test_the_stack_is_healthy_from_the_ready_line_on(stack: Served) -> None:
    assert status_of(f"{stack.http}/health") == 200


def test_the_official_client_gets_the_same_text(stack: Served, text: str) -> None:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="bundled", prompt="Once upon a time", max_tokens=6, temperature=0)
        assert whole.choices[0].text == text
        parts = client.completions.create(
            model="bundled", prompt="Once upon a time", max_tokens=6, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == text


async def test_a_bare_nats_client_gets_the_same_text(stack: Served, text: str) -> None:
    connection = await nats.connect(stack.nats)
    body = msgspec.json.encode({"prompt": "Once upon a time", "sampling": GREEDY})
    reply = await connection.request("pagewire.v1.generate.bundled", body, timeout=PATIENCE)
    await connection.close()
    assert msgspec.json.decode(reply.data)["choices"][0]["text"] == text


def test_the_command_prints_the_same_text(stack: Served, text: str) -> None:
    done = run("generate", "Once upon a time", "--max-tokens", "6", "--temperature", "0", "--nats-url", stack.nats)
    assert (done.returncode, done.stdout) == (0, f"Once upon a time{text}\n"), done.stderr


def test_a_role_that_the_chat_template_refuses_is_named(stack: Served) -> None:
    with Client(stack.nats) as client, pytest.raises(errors.InvalidRequest, match=r"template.*wizard"):
        client.chat([{"role": "wizard", "content": "hi"}])


def test_status_shows_every_service(stack: Served) -> None:
    done = run("status", "--nats-url", stack.nats)
    assert done.returncode == 0, done.stderr
    for service in ("tokenizer", "scheduler", "executor", "detokenizer", "gateway"):
        assert sum(line.startswith(service) and " ready " in line for line in done.stdout.splitlines()) == 1
    assert run("status", "--nats-url", stack.nats, "--service", "scheduler").returncode == 0
    for name, flag, code in (("scheduler", "--here", 0), ("scheduler", "--alive", 0), ("nobody", "--alive", 1)):
        assert run("status", "--nats-url", stack.nats, "--service", name, flag).returncode == code
    assert run("status", "--nats-url", "nats://127.0.0.1:9", "--service", "scheduler", "--alive").returncode == 0
    missing = run("status", "--nats-url", stack.nats, "--service", "nobody")
    assert (missing.returncode, missing.stdout.splitlines()[-1]) == (3, "not ready: nobody")


def test_doctor_finds_the_running_stack(stack: Served) -> None:
    done = run("doctor", "--nats-url", stack.nats)
    assert f"{stack.nats} serves bundled" in done.stdout


def test_status_counts_replicas(stack: Served) -> None:
    done = run("status", "--nats-url", stack.nats, "--data-parallel-size", "2")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "not ready: executor (1 of 2), scheduler (1 of 2)"


def test_more_replicas_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert describe_replicas(Settings(data_parallel_size=2, device="cpu")) == "2 on 2 cores"
    assert describe_replicas(Settings(data_parallel_size=3, device="cpu")) == "3 on 2 cores, which they share"
    assert describe_replicas(Settings(data_parallel_size=3, device="sim:h100")) == "3, each on its own device"


def test_a_request_leaves_a_waterfall(stack: Served) -> None:
    folder = next(
        part.partition("=")[2]
        for part in Path(f"/proc/{stack.service('tokenizer')}/environ").read_text().split("\0")
        if part.startswith("PAGEWIRE_TRACE_DIR=")
    )
    with Client(stack.nats) as client:
        client.generate("Once", GREEDY, request_id="waterfall")
    while not all(
        name in (done := run("trace", "waterfall", "--trace-dir", folder)).stdout for name in ("decode", "stream")
    ):
        pass
    assert done.returncode == 0
    stages = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert sorted(stages) == ["admit", "decode", "prefill", "queue", "receive", "run", "stream"]


async def test_a_killed_service_comes_back(stack: Served, text: str) -> None:
    killed = stack.service("tokenizer")
    os.kill(killed, signal.SIGKILL)
    await until(lambda: stack.find("tokenizer") not in (None, killed))
    with Client(stack.nats) as client:

        def serves() -> bool:
            try:
                return client.generate("Once upon a time", GREEDY).choices[0].text == text
            except errors.Unavailable:
                return False

        await until(serves)
    await until(lambda: status_of(f"{stack.http}/health") == 200)


async def test_a_service_that_ends_again_and_again_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = (sys.executable, "-c", "raise SystemExit(1)")
    monkeypatch.setattr(ServiceProgram, "command", property(lambda program: crash))
    settings = Settings(model=BUNDLED, nats_port=0, log_level="error")
    with pytest.raises(errors.Unavailable, match="tokenizer has ended 3 times"):
        async with Stack(settings, ("tokenizer",)) as stack:
            await stack.ready()


async def test_a_broker_whose_disk_was_full_is_restarted_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_care, "ROOM_CHECK_INTERVAL", 0.01)
    looks = iter([False, False, True])
    async with Broker(port=0) as broker:
        monkeypatch.setattr(broker, "has_room", lambda: next(looks))
        bus, first = await connect_service(broker), broker.pid
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(broker)) for run in (broker_care.keep_running, broker_care.end_broken)]
            broker._write_failed.set()
            await until(lambda: broker.pid != first)
            await bus.wait_connected()
            await bus.store.put_work("m", b"x")
            for task in running:
                task.cancel()
        assert next(looks, None) is None
        await bus.close()


def check_demo(*arguments: str) -> str:
    """Runs the demo; returns its first line."""
    done = run("demo", "--max-model-len", "256", "--num-kv-blocks", "64", *arguments)
    assert done.returncode == 0, done.stderr
    question, _, answer = done.stdout.split("\n", 2)
    assert answer.strip()
    for word in ("time to first token", "tokens/s", "receive", "queue", "prefill", "decode", "stream", "%", "█"):
        assert word in done.stdout
    assert "pagewire chat" in done.stdout.splitlines()[-5]
    return question


def test_the_demo_shows_a_question_its_answer_and_its_timings() -> None:
    output = check_demo()
    served, question = (DEFAULT.name, demo.QUESTION) if DEFAULT.is_fetched else (BUNDLED, demo.STORY)
    assert output == f"{served} is asked: {question}"


def test_the_demo_has_a_question_for_the_bundled_model() -> None:
    assert check_demo("--model", "bundled") == f"bundled is asked: {demo.STORY}"


def test_offline_generation_starts_its_own_stack(text: str) -> None:
    with LLM("bundled", max_model_len=256, num_kv_blocks=64) as llm:
        results = llm.generate(["Once upon a time", "Alice was"], GREEDY)
        assert results[0].outputs[0].text == text
        assert len(results[1].outputs[0].token_ids) == 6
        with pytest.raises(errors.InvalidRequest):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(errors.ContextLength):
            llm.generate("x", SamplingParams(max_tokens=1000))
