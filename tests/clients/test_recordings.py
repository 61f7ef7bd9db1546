"""Requests that real clients sent, against a stack with the scripted model."""

from collections.abc import Iterator

import pytest

from pagewire.shared.settings.config import Settings
from tests.clients.recording import Recording, load, summary
from tests.support.scripted_model import write_scripted_model
from tests.support.stack_thread import stack_url

RECORDINGS = load()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(
        model=str(write_scripted_model(tmp_path_factory.mktemp("model") / "scripted")),
        served_model_name="scripted",
        dtype="float32",
        port=0,
        nats_port=0,
        num_kv_blocks=8192,
        log_level="error",
    )
    with stack_url(settings) as url:
        yield url


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS.keys())
def test_a_clients_request_is_answered(url: str, recording: Recording) -> None:
    status, body = recording.replay(url)
    assert status == 200, body
    assert summary(body) == recording.answer
