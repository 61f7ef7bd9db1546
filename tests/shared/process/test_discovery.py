import socket
from typing import Any

import msgspec
import pytest

from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import RequestTimeout
from pagewire.shared.messages import WIRE_VERSION
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import discovery
from pagewire.shared.process.discovery import Responder
from pagewire.shared.settings.config import Settings
from tests.support.responder import settle

pytestmark = pytest.mark.anyio


OTHER = b'{"name": "shop", "id": "1", "started": "", "metadata": {}}'


def heartbeat() -> Heartbeat:
    return Heartbeat("tokenizer", "i1", ready=True, term=0, plan=0, step=0, load={"requests": 3.0})


async def ask(subject: str, name: str = "tokenizer") -> Any:
    broker = MemoryBroker()
    responder = Responder(MemoryBus(broker), name, "i1", Settings(served_model_name="m"), heartbeat)
    await responder.listen()
    reply = await MemoryBus(broker, inbox_prefix="_INBOX").request(subject, b"", timeout=1)
    return msgspec.json.decode(reply.data)


@pytest.mark.parametrize("suffix", ["", ".pagewire-tokenizer", ".pagewire-tokenizer.i1"])
async def test_requests_to_all_and_to_one_instance_are_answered(suffix: str) -> None:
    answer = await ask(f"$SRV.PING{suffix}")
    assert answer["type"] == "io.nats.micro.v1.ping_response"
    assert (answer["name"], answer["id"]) == ("pagewire-tokenizer", "i1")
    assert answer["metadata"] == {"model": "m", "wire_version": str(WIRE_VERSION), "host": socket.gethostname()}
    assert answer["version"].count(".") == 2


async def test_info_names_the_endpoints() -> None:
    answer = await ask("$SRV.INFO")
    assert answer["type"] == "io.nats.micro.v1.info_response"
    assert {endpoint["name"]: endpoint["subject"] for endpoint in answer["endpoints"]} == {
        "generate": "pagewire.v1.generate.*",
        "tokenize": "pagewire.v1.tokenize.*",
        "models": "pagewire.v1.models",
    }
    assert all(set(endpoint) == {"name", "subject", "queue_group", "metadata"} for endpoint in answer["endpoints"])


async def test_the_detokenizer_has_three_endpoints() -> None:
    endpoints = (await ask("$SRV.INFO", name="detokenizer"))["endpoints"]
    assert [endpoint["name"] for endpoint in endpoints] == ["detokenize", "cancel", "resume"]


async def test_statistics_have_the_load_and_the_state() -> None:
    answer = await ask("$SRV.STATS.pagewire-scheduler", name="scheduler")
    assert answer["type"] == "io.nats.micro.v1.stats_response"
    assert answer["metadata"]["ready"] == "true"
    assert answer["metadata"]["load.requests"] == "3"
    assert answer["started"].endswith("Z")
    assert answer["endpoints"] == []
    statistics = (await ask("$SRV.STATS"))["endpoints"][0]
    assert {"num_requests", "num_errors", "last_error", "processing_time", "average_processing_time"} < set(statistics)


async def test_only_inboxes_are_answered() -> None:
    """A client could otherwise make a service publish on a subject of ours."""
    broker = MemoryBroker()
    await Responder(MemoryBus(broker), "tokenizer", "i1", Settings(), heartbeat).listen()
    bus = MemoryBus(broker)
    received: list[Message] = []
    await bus.subscribe("pagewire.svc.plan.e1", received.append)
    bus.publish("$SRV.PING", b"", reply="pagewire.svc.plan.e1")
    await settle()
    assert received == []


@pytest.mark.parametrize(
    ("prefix", "answered"),
    [
        ("_SVC.tokenizer", True),
        ("_SVC.supervisor", True),
        ("_TENANT.alice", True),
        ("_SVC.scheduler", False),
        ("x", False),
    ],
)
async def test_clients_the_supervisor_and_the_probe_are_answered(prefix: str, answered: bool) -> None:
    broker = MemoryBroker()
    responder = Responder(MemoryBus(broker), "tokenizer", "i1", Settings(served_model_name="m"), heartbeat)
    await responder.listen()
    asking = MemoryBus(broker, inbox_prefix=prefix).request("$SRV.PING", b"", timeout=5 if answered else 0.05)
    if answered:
        assert (await asking).data
    else:
        with pytest.raises(RequestTimeout):
            await asking


async def test_services_of_other_programs_are_left_out() -> None:
    broker = MemoryBroker()
    await Responder(MemoryBus(broker), "tokenizer", "i1", Settings(served_model_name="m"), heartbeat).listen()
    other = MemoryBus(broker)

    def reply(message: Message) -> None:
        for body in (b'{"name": "shop", "id": "1", "started": "", "metadata": null}', b"{}", OTHER):
            other.publish(message.reply, body)

    await other.subscribe("$SRV.STATS", reply)
    found = await discovery.ask(MemoryBus(broker, inbox_prefix="_INBOX"))
    assert [stats.name for stats in found] == ["pagewire-tokenizer"]
