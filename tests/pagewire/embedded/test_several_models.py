"""One stack with several models, as its users start it."""

import os
import signal
from collections.abc import Iterator

import openai
import pytest

from pagewire import Client, SamplingParams
from pagewire.shared.errors import ModelNotFound
from tests.pagewire.serving import Served, run, serving
from tests.support.checkpoints import checkpoint
from tests.support.waiting import until

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
    assert len(stack.processes()) == 2 * 4 + 2
    with Client(stack.nats) as client, openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none") as http:
        assert {info.name for info in client.models()} == {"stories", "qwen3"}
        assert {model.id for model in http.models.list()} == {"stories", "qwen3"}
        texts = {name: text(client, name) for name in ("stories", "qwen3")}
        assert texts["stories"] != texts["qwen3"]
        for name, expected in texts.items():
            done = http.completions.create(
                model=name, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
            )
            assert done.choices[0].text == expected
        with pytest.raises(ModelNotFound, match="stories"):
            text(client, "other")


async def test_a_killed_model_comes_back_and_the_other_one_goes_on(stack: Served) -> None:
    with Client(stack.nats) as client:
        before = text(client, "qwen3")
        killed = stack.service("executor", "qwen3")
        os.kill(killed, signal.SIGKILL)
        assert text(client, "stories")
        assert text(client, "qwen3") == before, "the request waited for the executor"
        await until(lambda: stack.find("executor", "qwen3") not in (None, killed))


def test_models_that_do_not_fit_are_refused_with_numbers_before_anything_starts() -> None:
    done = run("serve", "bundled", str(checkpoint("qwen3")), "--device", "cpu", "--kv-cache-memory", "4000GiB")
    assert done.returncode == 2
    assert "bundled at least 4295" in done.stderr
    assert "are free" in done.stderr
    assert "kv_pool" not in done.stderr


def test_two_models_of_one_name_are_refused() -> None:
    done = run("serve", "bundled", "bundled")
    assert done.returncode == 2
    assert "two models are called bundled" in done.stderr
