"""The table of permissions on a real server: every user of it against every subject of it.

The table is written by hand, so that `shared/security/permissions.py` has something to agree with.
"""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagewire.embedded import broker_config
from pagewire.embedded.broker import find_server
from pagewire.shared.bus import Message, nats
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.errors import ConfigurationError, NotPermitted
from pagewire.shared.process.runtime import inboxes_of
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.security.permissions import CLIENT, OPERATOR, ROLES
from pagewire.shared.subjects import client_inbox
from tests.support.broker import running_broker
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
KEYS = {"alice": "alice-key-0123456789", "bob": "1bob-key-0123456789"}
PASSWORD = '1 "digit" first \\'
"""Password of each service in `deploy/nats.conf`: a server would end if it read the text as it is."""

REQUESTS = ("generate.m", "tokenize.m", "detokenize.m", "models", "cancel.r", "cancel.d.r.secret", "resume.d.r.secret")
OF_CLIENTS = {f"pagewire.v1.{request}" for request in REQUESTS}
OF_ALICE = {f"pagewire.v1.tenant.alice.{request}" for request in REQUESTS}
OF_BOB = {f"pagewire.v1.tenant.bob.{request}" for request in REQUESTS}
OF_ANYONE = OF_CLIENTS | OF_ALICE | OF_BOB
INBOXES_OF_CLIENTS = {"_INBOX.x.1", "_INBOX.gateway.x.1"}
INBOXES_OF_ALICE = {"_TENANT.alice.x.1", "_TENANT.alice.gateway.x.1"}
INBOXES_OF_BOB = {"_TENANT.bob.x.1", "_TENANT.bob.gateway.x.1"}
INBOXES = INBOXES_OF_CLIENTS | INBOXES_OF_ALICE | INBOXES_OF_BOB
HEARTBEATS = {f"pagewire.svc.heartbeat.{role}.i" for role in ROLES if role != "supervisor"}
STREAMS = {
    f"$JS.API.STREAM.{verb}.PAGEWIRE_{stream}"
    for verb in ("CREATE", "UPDATE", "INFO")
    for stream in ("WORK", "DONE", "TERM")
}
GET_DONE = {"$JS.API.DIRECT.GET.PAGEWIRE_DONE.pagewire.done.r", "$JS.API.STREAM.MSG.GET.PAGEWIRE_DONE"}
GET_ADAPTERS = {
    "$JS.API.DIRECT.GET.PAGEWIRE_ADAPTERS",
    "$JS.API.DIRECT.GET.PAGEWIRE_ADAPTERS.pagewire.adapter.name.m.a",
    "$JS.API.STREAM.MSG.GET.PAGEWIRE_ADAPTERS",
}
ADAPTERS = {"pagewire.v1.adapters.load.m", "pagewire.v1.adapters.unload.m"}
ADAPTER_NAME = "pagewire.adapter.name.m.a"
SET_ADAPTERS = {
    *(f"$JS.API.STREAM.{verb}.PAGEWIRE_ADAPTERS" for verb in ("CREATE", "UPDATE", "INFO", "PURGE")),
    ADAPTER_NAME,
    "pagewire.adapter.content.h.0",
}
ACKS = {"$JS.ACK.PAGEWIRE_WORK.c.1.1.1.1.0", "$JS.ACK.domain.hash.PAGEWIRE_WORK.c.1.1.1.1.0.x"}
SUBJECTS = {
    *OF_ANYONE,
    *INBOXES,
    *(f"_SVC.{role}.x.1" for role in ROLES),
    *HEARTBEATS,
    *STREAMS,
    *ACKS,
    *GET_DONE,
    *GET_ADAPTERS,
    *SET_ADAPTERS,
    *ADAPTERS,
    *(f"pagewire.svc.detokenizer.d.{verb}" for verb in ("open", "stored", "attach", "abort", "ping")),
    "pagewire.svc.adopted.d",
    "pagewire.svc.traces",
    "pagewire.svc.recent_steps",
    "pagewire.svc.recent_requests",
    "pagewire.svc.faults",
    "pagewire.svc.scheduler.s.abort",
    *(f"pagewire.svc.{edge}.e" for edge in ("plan", "steps", "replay", "claim")),
    "pagewire.svc.prefixes.m.s",
    "pagewire.svc.backlog.m.s",
    "pagewire.work.m.7.normal.any",
    "pagewire.work.check",
    "pagewire.done.r",
    "pagewire.done.$check",
    "pagewire.term",
    "$JS.API.INFO",
    *(f"$JS.API.STREAM.{verb}.PAGEWIRE_WORK" for verb in ("DELETE", "PURGE", "MSG.GET", "MSG.DELETE")),
    "$JS.API.DIRECT.GET.PAGEWIRE_WORK",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.CONSUMER.CREATE.PAGEWIRE_WORK.c.pagewire.work.m.7.normal.any",
    "$JS.API.CONSUMER.MSG.NEXT.PAGEWIRE_WORK.c",
    "$JS.API.CONSUMER.DELETE.PAGEWIRE_WORK.c",
    "$JS.API.CONSUMER.INFO.PAGEWIRE_WORK.c",
    "$JS.API.CONSUMER.PAUSE.PAGEWIRE_WORK.c",
    "$JS.ACK.OTHER.c.1.1.1.1.0",
    "$SRV.PING",
    "$SRV.PING.pagewire-executor.i",
    *(f"$SRV.STATS.pagewire-{role}" for role in ROLES if role != "supervisor"),
    "$SYS.REQ.SERVER.PING",
}
DISCOVERY = {subject for subject in SUBJECTS if subject.startswith("$SRV.")}
PATTERNS = {">", "*.>", "pagewire.>", "pagewire.v1.>", "pagewire.svc.>", "_INBOX.>", "_INBOX.*", "_TENANT.>"} | {
    "_TENANT.*.x.>",
    "_TENANT.alice.>",
    "_SVC.>",
    "_SVC.*.x.>",
    "$SRV.>",
    "$JS.>",
    "$SYS.>",
}


@dataclass(frozen=True)
class Row:
    """One user's part of the table; the rest must be denied."""

    publish: set[str]
    subscribe: set[str]


def service(name: str, publish: set[str], subscribe: set[str]) -> Row:
    """A service, with what all of them may do."""
    both = {f"$SRV.STATS.pagewire-{name}", f"_SVC.{name}.x.1", "pagewire.svc.traces"}
    always = {f"pagewire.svc.heartbeat.{name}.i", *both}
    heard = {*HEARTBEATS, "$SRV.PING", *both}
    heard |= {subject for subject in DISCOVERY if subject == f"$SRV.PING.pagewire-{name}.i"}
    return Row({*always, "_SVC.supervisor.x.1", *publish}, heard | subscribe)


def of(requests: set[str], *verbs: str) -> set[str]:
    return {subject for subject in requests if any(f".{verb}." in f"{subject}." for verb in verbs)}


TABLE = {
    CLIENT: Row(OF_CLIENTS | DISCOVERY, INBOXES_OF_CLIENTS | {"_INBOX.>", "_INBOX.*"}),
    "alice": Row(OF_ALICE | DISCOVERY, INBOXES_OF_ALICE | {"_TENANT.alice.>"}),
    "bob": Row(OF_BOB | DISCOVERY, INBOXES_OF_BOB),
    "tokenizer": service(
        "tokenizer",
        {
            *INBOXES,
            "pagewire.svc.detokenizer.d.open",
            "pagewire.svc.detokenizer.d.stored",
            "pagewire.svc.detokenizer.d.abort",
            "pagewire.work.m.7.normal.any",
            "pagewire.work.check",
            "pagewire.done.$check",
            "$JS.API.STREAM.INFO.PAGEWIRE_WORK",
            "$JS.API.STREAM.INFO.PAGEWIRE_DONE",
            *GET_ADAPTERS,
        },
        of(OF_ANYONE, "generate", "tokenize", "models")
        | {"pagewire.svc.prefixes.m.s", "pagewire.svc.backlog.m.s", ADAPTER_NAME},
    ),
    "scheduler": service(
        "scheduler",
        {
            *STREAMS,
            *ACKS,
            *GET_DONE,
            "_SVC.detokenizer.x.1",
            "pagewire.svc.detokenizer.d.attach",
            "pagewire.svc.detokenizer.d.abort",
            "pagewire.svc.plan.e",
            "pagewire.svc.replay.e",
            "pagewire.svc.claim.e",
            "pagewire.svc.prefixes.m.s",
            "pagewire.svc.backlog.m.s",
            "pagewire.term",
            "pagewire.work.m.7.normal.any",
            "$JS.API.DIRECT.GET.PAGEWIRE_WORK",
            "$JS.API.CONSUMER.CREATE.PAGEWIRE_WORK.c.pagewire.work.m.7.normal.any",
            "$JS.API.CONSUMER.MSG.NEXT.PAGEWIRE_WORK.c",
            "$JS.API.CONSUMER.INFO.PAGEWIRE_WORK.c",
            "$JS.API.CONSUMER.DELETE.PAGEWIRE_WORK.c",
        },
        {"pagewire.svc.scheduler.s.abort", "pagewire.svc.steps.e", "pagewire.svc.backlog.m.s"},
    ),
    "executor": service(
        "executor",
        {"pagewire.svc.steps.e", "_SVC.scheduler.x.1", "_SVC.detokenizer.x.1", *GET_ADAPTERS, *SET_ADAPTERS},
        {
            "pagewire.svc.plan.e",
            "pagewire.svc.replay.e",
            "pagewire.svc.claim.e",
            "pagewire.svc.recent_steps",
            *ADAPTERS,
        },
    ),
    "detokenizer": service(
        "detokenizer",
        {
            *INBOXES,
            *STREAMS,
            *ACKS,
            *GET_DONE,
            "_SVC.tokenizer.x.1",
            "_SVC.scheduler.x.1",
            "pagewire.svc.scheduler.s.abort",
            "pagewire.svc.replay.e",
            "pagewire.svc.detokenizer.d.ping",
            "pagewire.svc.adopted.d",
            "$JS.API.DIRECT.GET.PAGEWIRE_WORK",
            "pagewire.done.r",
            "pagewire.done.$check",
        },
        {
            "pagewire.svc.adopted.d",
            *of(OF_ANYONE, "cancel", "resume", "detokenize"),
            *(f"pagewire.svc.detokenizer.d.{verb}" for verb in ("open", "stored", "attach", "abort", "ping")),
            "pagewire.svc.steps.e",
            "pagewire.svc.recent_requests",
        },
    ),
    "gateway": service(
        "gateway",
        OF_ANYONE | ADAPTERS | {"pagewire.svc.recent_steps", "pagewire.svc.recent_requests", "pagewire.svc.faults"},
        {"_INBOX.gateway.x.1", "_TENANT.alice.gateway.x.1", "_TENANT.bob.gateway.x.1"},
    ),
    "supervisor": Row(
        {*HEARTBEATS, "$JS.API.INFO", *(subject for subject in DISCOVERY if subject.count(".") > 1)},
        {*HEARTBEATS, "pagewire.svc.faults", "_SVC.supervisor.x.1"},
    ),
}


@dataclass(frozen=True)
class Server:
    url: str
    passwords: dict[str, str]

    async def connect(self, user: str) -> NatsBus:
        inboxes = inboxes_of(user) if user in ROLES else client_inbox("" if user in {CLIENT, OPERATOR} else user)
        password = self.passwords[user]
        name = user if password else ""
        return await nats.connect(self.url, name="test", user=name, password=password, inbox_prefix=inboxes)


def write_keys(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    return path


@contextmanager
def containers(folder: Path) -> Iterator[Server]:
    """The server of `compose.yaml`, with the configuration that `pagewire nats-config` prints for two tenants."""
    secrets = folder / "secrets"
    secrets.mkdir()
    for role in ROLES:
        (secrets / role).write_text(PASSWORD + "\n")
    (secrets / "api-keys").write_text("# beside the passwords, as `make secrets` writes them\n")
    config = secrets / "nats.conf"
    text = broker_config.file(ApiKeys.load(write_keys(folder)).passwords)
    config.write_text(text.replace("/data", str(folder / "data")))
    place = ["--config", str(config), "--addr", "127.0.0.1", "--port", "-1", "--http_port", "-1"]
    environment = {"PATH": f"{Path(find_server()).parent}:{os.environ['PATH']}", "PAGEWIRE_API_KEY": "1 key"}
    command = [str(ROOT / "deploy/nats-server.sh"), str(secrets), *place]
    log = folder / "log"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stderr=output) as process:
        try:
            while (match := re.search(r"Listening for client connections on .*:(\d+)", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            passwords = {**dict.fromkeys(ROLES, PASSWORD), CLIENT: "1 key", **KEYS}
            yield Server(f"nats://127.0.0.1:{match[1]}", passwords)
        finally:
            process.terminate()


@pytest.fixture(scope="module", params=["embedded", "containers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        if request.param == "containers":
            yield stack.enter_context(containers(folder))
        else:
            broker = stack.enter_context(running_broker("client-key", ApiKeys.load(write_keys(folder))))
            passwords = {**broker.passwords, CLIENT: "client-key", **KEYS, OPERATOR: broker.password}
            yield Server(broker.url, passwords)


def test_every_user_is_in_the_table() -> None:
    assert set(TABLE) == {CLIENT, *KEYS, *ROLES}


@pytest.mark.parametrize("user", TABLE)
async def test_a_user_publishes_where_the_table_says_and_nowhere_else(server: Server, user: str) -> None:
    bus = await server.connect(user)
    allowed = set()
    for subject in SUBJECTS:
        before = bus.denials
        bus.publish(subject, b"")
        await bus.flush()
        if bus.denials == before:
            allowed.add(subject)
    await bus.close()
    assert allowed == TABLE[user].publish


@pytest.mark.parametrize("user", TABLE)
async def test_a_user_subscribes_where_the_table_says_and_nowhere_else(server: Server, user: str) -> None:
    bus = await server.connect(user)
    allowed = set()
    for subject in SUBJECTS | PATTERNS:
        try:
            await (await bus.subscribe(subject, lambda message: None)).unsubscribe()
        except NotPermitted:
            continue
        allowed.add(subject)
    await bus.close()
    assert allowed == TABLE[user].subscribe


async def test_each_user_needs_its_own_credentials(server: Server) -> None:
    wrong = [("", ""), (CLIENT, "x"), ("alice", KEYS["bob"]), ("executor", "x"), ("executor", KEYS["alice"])]
    for user, password in wrong:
        with pytest.raises(ConfigurationError, match="credentials"):
            await nats.connect(server.url, name="test", user=user, password=password)


async def test_a_client_may_not_use_the_inboxes_of_others(server: Server) -> None:
    for prefix in (client_inbox(""), client_inbox("bob"), inboxes_of("executor")):
        with pytest.raises(ConfigurationError, match="whose inboxes"):
            await nats.connect(server.url, name="t", user="alice", password=KEYS["alice"], inbox_prefix=prefix)


async def test_a_service_answers_each_request_once(server: Server) -> None:
    """So it answers discovery without a right to write to the inboxes of clients."""
    executor, alice = await server.connect("executor"), await server.connect("alice")
    requests: list[Message] = []
    await executor.subscribe("$SRV.PING", requests.append)
    heard: list[Message] = []
    with alice.inbox(heard.append) as inbox:
        alice.publish("$SRV.PING", b"", reply=inbox)
        async with asyncio.timeout(PATIENCE):
            while not requests:
                await alice.flush()
                await executor.flush()
        executor.publish(requests[0].reply, b"here")
        executor.publish(requests[0].reply, b"again")
        await executor.flush()
        await alice.flush()
        assert [message.data for message in heard] == [b"here"]
        assert executor.denials == 1
    await executor.close()
    await alice.close()


def test_the_shipped_file_equals_the_commands_output() -> None:
    assert (ROOT / "deploy/nats.conf").read_text() == broker_config.file({})
