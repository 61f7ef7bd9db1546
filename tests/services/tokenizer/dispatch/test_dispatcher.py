import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from pagewire.services.tokenizer.dispatch import dispatcher
from pagewire.services.tokenizer.dispatch.admission import Admission
from pagewire.services.tokenizer.dispatch.dispatcher import Dispatcher, Outcome
from pagewire.services.tokenizer.dispatch.replica_router import ReplicaRouter
from pagewire.services.tokenizer.dispatch.request_messages import RequestMessages
from pagewire.services.tokenizer.dispatch.store_monitor import StoreMonitor
from pagewire.shared import subjects
from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import (
    BusError,
    BusUnavailable,
    ConnectionLost,
    DuplicateRequest,
    MessageTooLarge,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    StorageRefused,
    Unavailable,
)
from pagewire.shared.messages import Decoder, pack
from pagewire.shared.messages.open import OpenState, OpenStream
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.process.peers import Peers
from pagewire.shared.rendezvous import rank
from tests.services.tokenizer.harness import FakeDetokenizer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

QUEUE = subjects.work_queue("m", 0, subjects.ANY)
OPENING = OpenStream("r1", b"d", "_INBOX.a", 0, False, (pack([1]),), pack([1]), 1, (), (), False, True, 0, 60_000)
WORK = WorkItem("r1", "", (pack([1]),), 1, Sampling(16, seed=7), 0, 1e12)
HEADERS = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}


class Scene:
    """Detokenizers a and b of one broker, and the dispatcher under test."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.bus = MemoryBus(broker)
        self.peers = Peers(self.bus)
        self.monitor = StoreMonitor(self.bus.store, on_change=lambda: None)
        self.admission = Admission(self.bus, "m", self.peers, lambda: 0, None)
        self.dispatcher = Dispatcher(
            self.bus, self.peers, ReplicaRouter(self.bus, self.peers, "m"), self.monitor, self.admission, "m"
        )
        self.first, self.second = (FakeDetokenizer(MemoryBus(broker), name) for name in rank("r1", ["a", "b"]))

    async def start(self, *detokenizers: FakeDetokenizer) -> None:
        await self.peers.listen("detokenizer")
        for detokenizer in detokenizers:
            await detokenizer.start()

    async def dispatch(self) -> Outcome:
        return await self.dispatcher.dispatch(RequestMessages(OPENING, WORK, HEADERS))

    async def stored(self) -> list[WorkItem]:
        items = await self.bus.store.pull_work(QUEUE, 10, expires=0.01)
        assert all(item.headers == HEADERS for item in items)
        return [Decoder(WorkItem).decode(item.data) for item in items]


@pytest.fixture
async def scene() -> Scene:
    return Scene(MemoryBroker(max_payload=10_000))


def refuse_work(scene: Scene, monkeypatch: pytest.MonkeyPatch, error: BusError) -> None:
    async def put_work(queue: str, data: bytes, *, headers: Headers | None = None) -> None:
        raise error

    monkeypatch.setattr(scene.bus.store, "put_work", put_work)


async def test_the_work_names_the_detokenizer_that_opened_the_stream(scene: Scene) -> None:
    await scene.start(scene.first, scene.second)
    assert await scene.dispatch() is Outcome.STORED
    (work,) = await scene.stored()
    assert work.detokenizer == scene.first.instance
    assert (scene.first.opened, scene.first.headers) == ([OPENING], [HEADERS])
    await until(lambda: scene.first.told_stored == ["r1"])
    assert scene.second.opened == []


async def test_the_stream_is_open_before_the_work_is_stored(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dies after the queue's acknowledgement, the detokenizer tells the client."""

    await scene.start(scene.first)
    opened_before: list[int] = []
    put_work = scene.bus.store.put_work

    async def spy(queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        opened_before.append(len(scene.first.opened))
        return await put_work(queue, data, headers=headers)

    monkeypatch.setattr(scene.bus.store, "put_work", spy)
    await scene.dispatch()
    assert opened_before == [1]


async def test_without_a_detokenizer_nothing_is_stored(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SUCCESSOR_TIMEOUT", 0.1)
    await scene.start()
    with pytest.raises(Unavailable):
        await scene.dispatch()
    assert await scene.stored() == []


async def test_a_detokenizer_that_is_not_ready_is_not_chosen(scene: Scene) -> None:
    await scene.start(scene.first, scene.second)
    scene.first.beat(ready=False)
    await scene.bus.flush()
    await scene.dispatch()
    assert (len(scene.first.opened), len(scene.second.opened)) == (0, 1)


async def test_a_draining_detokenizer_is_chosen_while_no_other_is_ready(scene: Scene) -> None:
    await scene.start(scene.first, scene.second)
    scene.first.beat(ready=False, draining=True, awaits_successor=True)
    await scene.bus.flush()
    await scene.dispatch()
    assert (len(scene.first.opened), len(scene.second.opened)) == (0, 1)
    scene.second.beat(ready=False, draining=True)
    await scene.bus.flush()
    await scene.dispatch()
    assert (len(scene.first.opened), len(scene.second.opened)) == (1, 1)


async def test_a_detokenizer_is_asked_again_when_it_was_the_broker_that_was_silent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start(scene.first)
    request, silent = scene.bus.request, [True]

    async def ask(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        if silent:
            raise RequestTimeout("no reply")
        return await request(subject, data, timeout=timeout, headers=headers)

    async def flush(*, timeout: float = 2.0) -> None:
        silent.clear()
        raise RequestTimeout("the broker did not answer")

    monkeypatch.setattr(scene.bus, "request", ask)
    monkeypatch.setattr(scene.bus, "flush", flush)
    assert await scene.dispatch() is Outcome.STORED
    assert (len(scene.first.opened), scene.first.aborted) == (1, [])


async def test_a_detokenizer_is_asked_again_when_the_tokenizer_itself_was_frozen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start(scene.first)
    request, now, frozen = scene.bus.request, [0.0], [20.0]

    async def ask(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        if subject.endswith(".open") and frozen:
            now[0] += frozen.pop()
            raise RequestTimeout("no reply was read")
        return await request(subject, data, timeout=timeout, headers=headers)

    began = time.monotonic
    monkeypatch.setattr(scene.bus, "request", ask)
    monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: began() + now[0]))
    assert await scene.dispatch() is Outcome.STORED
    assert len(scene.first.opened) == 1


async def test_the_next_detokenizer_in_rank_replaces_one_that_has_just_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ABSENCE", 0.05)
    await scene.start(scene.first, scene.second)
    await scene.first.bus.close()
    assert await scene.dispatch() is Outcome.STORED
    (work,) = await scene.stored()
    assert work.detokenizer == scene.second.instance


async def test_a_detokenizer_that_moves_to_another_server_is_waited_for(scene: Scene) -> None:
    await scene.start()
    scene.first.beat()
    scene.second.beat()
    await scene.bus.flush()
    dispatching = asyncio.create_task(scene.dispatch())
    await asyncio.sleep(0.05)  # it has found nobody
    await scene.first.start()
    await scene.second.start()
    assert await dispatching is Outcome.STORED
    assert (len(scene.first.opened), len(scene.second.opened)) == (1, 0)


async def test_a_detokenizer_that_was_silent_is_waited_for(scene: Scene) -> None:
    await scene.start()
    dispatching = asyncio.create_task(scene.dispatch())
    await asyncio.sleep(0.05)  # it knows of nobody
    await scene.first.start()
    assert await dispatching is Outcome.STORED


async def test_a_lost_message_is_sent_again_to_a_detokenizer_that_lives(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start(scene.first, scene.second)
    request, losses = scene.bus.request, iter([ConnectionLost("lost"), RequestTimeout("no reply")])

    async def lossy(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        if subject.endswith(".open") and (loss := next(losses, None)) is not None:
            scene.first.beat()
            await scene.bus.flush()
            raise loss
        return await request(subject, data, timeout=timeout, headers=headers)

    monkeypatch.setattr(scene.bus, "request", lossy)
    assert await scene.dispatch() is Outcome.STORED
    assert (len(scene.first.opened), len(scene.second.opened)) == (1, 0)


async def test_records_that_have_no_leader_are_waited_for(scene: Scene) -> None:
    scene.first.state = OpenState.UNAVAILABLE
    await scene.start(scene.first)
    dispatching = asyncio.create_task(scene.dispatch())
    await until(lambda: len(scene.first.opened) > 1)
    scene.first.state = OpenState.OPENED
    assert await dispatching is Outcome.STORED


async def test_an_abort_is_repeated_until_a_moving_detokenizer_is_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ABORT_INTERVAL", 0.01)
    await scene.start(scene.first)
    refuse_work(scene, monkeypatch, RequestTimeout("no acknowledgement"))
    request, absent = scene.bus.request, iter([True, True, False])

    async def moving(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        if subject.endswith(".abort") and next(absent):
            raise NoResponders("nobody")
        return await request(subject, data, timeout=timeout, headers=headers)

    monkeypatch.setattr(scene.bus, "request", moving)
    assert await scene.dispatch() is Outcome.ABORTED
    assert len(scene.first.aborted) == 1


async def test_without_any_detokenizer_left_the_request_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ABSENCE", 0.05)
    monkeypatch.setattr(dispatcher, "SUCCESSOR_TIMEOUT", 0.1)
    await scene.start(scene.first)
    await scene.first.bus.close()
    with pytest.raises(Unavailable) as caught:
        await scene.dispatch()
    assert caught.value.retry_after_ms


@pytest.mark.parametrize(
    ("state", "error"),
    [(OpenState.CONFLICT, DuplicateRequest), (OpenState.FULL, Overloaded), (OpenState.UNAVAILABLE, Unavailable)],
)
async def test_a_refusal_stores_nothing(
    scene: Scene, state: OpenState, error: type[RequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "OPEN_TIMEOUT", 0.2)
    scene.first.state = state
    await scene.start(scene.first, scene.second)
    with pytest.raises(error):
        await scene.dispatch()
    assert await scene.stored() == []
    assert scene.second.opened == []


async def test_with_a_refusal_only_a_known_request_is_attached_to(scene: Scene) -> None:
    refusal = Overloaded("too long", 5000)
    await scene.start(scene.first, scene.second)
    scene.first.state = scene.second.state = OpenState.ABSENT
    with pytest.raises(Overloaded) as caught:
        await scene.dispatcher.dispatch(RequestMessages(OPENING, WORK, HEADERS), refusal)
    assert caught.value is refusal
    scene.first.state = OpenState.ATTACHED
    assert await scene.dispatcher.dispatch(RequestMessages(OPENING, WORK, HEADERS), refusal) is Outcome.ATTACHED
    assert all(opening.joins for opening in (*scene.first.opened, *scene.second.opened))
    assert await scene.stored() == []


async def test_a_request_that_waits_is_stored_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without a stream gets no frame while its request waits, and sends the request again."""
    monkeypatch.setattr(dispatcher, "STORED_KEPT", 1)
    await scene.start(scene.first)
    scene.first.state = OpenState.WAITING
    assert await scene.dispatch() is Outcome.STORED, "this tokenizer has not stored it"
    assert await scene.dispatch() is Outcome.ATTACHED
    assert len(await scene.stored()) == 1
    scene.first.state = OpenState.OPENED
    assert await scene.dispatch() is Outcome.STORED, "the stream is a new one"
    await scene.dispatcher.dispatch(RequestMessages(OPENING, msgspec.structs.replace(WORK, request_id="r2"), HEADERS))
    scene.first.state = OpenState.WAITING
    assert await scene.dispatch() is Outcome.STORED, "too many others were stored since"


async def test_a_request_that_runs_already_is_not_stored_again(scene: Scene) -> None:
    scene.first.state = OpenState.ATTACHED
    await scene.start(scene.first)
    assert await scene.dispatch() is Outcome.ATTACHED
    assert await scene.stored() == []
    assert scene.first.aborted == []


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (BusUnavailable("closed"), "unavailable"),
        (StorageRefused("pagewire.work.m", "insufficient storage resources available"), "unavailable"),
        (RequestTimeout("no acknowledgement"), "unavailable"),
        (MessageTooLarge(2, 1), "payload_too_large"),
    ],
)
async def test_work_that_is_not_stored_is_aborted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, failure: BusError, kind: str
) -> None:
    """The stream is open by then, so it is the detokenizer that tells the client."""

    await scene.start(scene.first)
    refuse_work(scene, monkeypatch, failure)
    assert await scene.dispatch() is Outcome.ABORTED
    (abort,) = scene.first.aborted
    assert (abort.request_id, abort.error) == ("r1", kind)
    assert abort.message


async def test_a_refusal_of_the_store_reaches_the_client_with_its_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start(scene.first)
    refuse_work(scene, monkeypatch, StorageRefused("pagewire.work.m", "insufficient resources"))
    await scene.dispatch()
    (abort,) = scene.first.aborted
    assert "insufficient resources" in abort.message
    assert "pagewire.work" not in abort.message


async def test_a_store_that_is_known_to_refuse_is_not_waited_for(scene: Scene) -> None:
    await scene.start(scene.first)
    scene.monitor.refusal = "no answer"
    assert await scene.dispatch() is Outcome.ABORTED
    (abort,) = scene.first.aborted
    assert (abort.error, await scene.stored()) == ("unavailable", [])
    assert "no answer" in abort.message
    scene.first.state = OpenState.ATTACHED
    assert await scene.dispatch() is Outcome.ATTACHED, "a known request needs no store"


async def test_an_abort_is_repeated_until_it_arrives(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the broker dies between the opening of a stream and the storing of its work."""
    monkeypatch.setattr(dispatcher, "ABORT_INTERVAL", 0.01)
    await scene.start(scene.first)
    refuse_work(scene, monkeypatch, ConnectionLost("no connection"))
    request, lost = scene.bus.request, iter([True, True, False])

    async def lossy(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        if subject.endswith(".abort") and next(lost):
            raise ConnectionLost("no connection")
        return await request(subject, data, timeout=timeout, headers=headers)

    monkeypatch.setattr(scene.bus, "request", lossy)
    assert await scene.dispatch() is Outcome.ABORTED
    assert [abort.error for abort in scene.first.aborted] == ["unavailable"]


async def test_an_unanswered_abort_ends_the_request_as_unavailable(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(dispatcher, "ABORT_TIMEOUT", 0.2)

    await scene.start(scene.first)

    async def put_work(queue: str, data: bytes, *, headers: Headers | None = None) -> None:
        scene.first.deaf = True
        raise BusUnavailable("closed")

    monkeypatch.setattr(scene.bus.store, "put_work", put_work)
    with pytest.raises(Unavailable):
        await scene.dispatch()


async def test_a_detokenizer_that_does_not_answer_is_told_to_give_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have opened the stream: after a second one elsewhere, the client would get every frame twice."""
    monkeypatch.setattr(dispatcher, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(dispatcher, "ABORT_TIMEOUT", 0.2)

    scene.first.answers_open = False
    await scene.start(scene.first, scene.second)
    assert await scene.dispatch() is Outcome.ABORTED
    assert [abort.error for abort in scene.first.aborted] == ["unavailable"]
    assert scene.second.opened == []
    assert await scene.stored() == []


async def test_a_request_waits_for_a_detokenizer_that_restarts(scene: Scene) -> None:
    await scene.start()
    dispatching = asyncio.create_task(scene.dispatch())
    await scene.bus.flush()
    assert not dispatching.done()
    await scene.first.start()
    assert await dispatching is Outcome.STORED


async def test_the_successor_of_a_dead_detokenizer_opens_the_unanswered_stream(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ANSWER_TIMEOUT", 0.05)
    scene.first.answers_open = False
    await scene.start(scene.first, scene.second)
    dispatching = asyncio.create_task(scene.dispatch())
    await until(lambda: scene.first.opened)
    scene.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{scene.first.instance}", b"")
    assert await dispatching is Outcome.STORED
    (work,) = await scene.stored()
    assert work.detokenizer == scene.second.instance


async def test_a_work_item_carries_the_message_that_opens_its_stream(scene: Scene) -> None:
    await scene.start(scene.first)
    await scene.dispatch()
    (work,) = await scene.stored()
    assert Decoder(OpenStream).decode(work.opening) == OPENING


async def test_a_frozen_detokenizer_ends_in_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SUCCESSOR_TIMEOUT", 0.1)
    monkeypatch.setattr(dispatcher, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(dispatcher, "ABORT_TIMEOUT", 0.2)

    scene.first.deaf = True
    await scene.start(scene.first)
    with pytest.raises(Unavailable):
        await scene.dispatch()
    assert await scene.stored() == []


async def test_a_stream_that_may_be_open_is_kept_through_a_restart_of_the_broker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detokenizer has opened it, the answer is lost, and the detokenizer subscribes later than this tokenizer."""
    await scene.start(scene.first, scene.second)
    request, failures = (
        scene.bus.request,
        iter([ConnectionLost("lost"), NoResponders("nobody"), NoResponders("nobody")]),
    )

    async def lossy(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        failure = next(failures, None)
        if isinstance(failure, NoResponders):
            raise failure
        answer = await request(subject, data, timeout=timeout, headers=headers)
        if failure is not None:
            raise failure
        return answer

    monkeypatch.setattr(scene.bus, "request", lossy)
    assert await scene.dispatch() is Outcome.STORED
    assert (len(scene.first.opened), scene.second.opened) == (2, [])
    (work,) = await scene.stored()
    assert work.detokenizer == scene.first.instance


async def test_a_detokenizer_that_has_not_yet_resubscribed_is_waited_for(scene: Scene) -> None:
    await scene.start(scene.first)
    await scene.first.bus.close()
    dispatching = asyncio.create_task(scene.dispatch())
    await asyncio.sleep(0)
    again = FakeDetokenizer(MemoryBus(scene.broker), scene.first.instance)
    await again.start()
    assert await dispatching is Outcome.STORED
    assert len(again.opened) == 1


async def test_requests_wait_for_the_successor_of_a_detokenizer_that_drains(scene: Scene) -> None:
    await scene.start(scene.first)
    scene.first.beat(ready=False, draining=True)
    await scene.bus.flush()
    dispatching = asyncio.create_task(scene.dispatch())
    await scene.bus.flush()
    assert not dispatching.done()
    await scene.second.start()
    assert await dispatching is Outcome.STORED
    assert (scene.first.opened, len(scene.second.opened)) == ([], 1)


@pytest.mark.parametrize("state", [OpenState.ABSENT, OpenState.ATTACHED])
async def test_a_stopping_tokenizer_only_joins_streams_that_are_open(scene: Scene, state: OpenState) -> None:
    await scene.start(scene.first, scene.second)
    scene.first.state, scene.second.state = OpenState.ABSENT, state
    scene.dispatcher.stopping = True
    if state is OpenState.ATTACHED:
        assert await scene.dispatch() is Outcome.ATTACHED
    else:
        with pytest.raises(Unavailable, match="stopping") as caught:
            await scene.dispatch()
        assert caught.value.retry_after_ms
    assert [opening.joins for opening in scene.first.opened + scene.second.opened] == [True, True]
    assert await scene.stored() == []


async def test_a_stream_that_does_not_fit_into_a_message_is_refused(scene: Scene) -> None:
    await scene.start(scene.first)
    opening = OpenStream("r1", b"d", "_INBOX.a", 0, False, (), b"", 1, ("x" * 10_000,), (), False, True, 0, 60_000)
    with pytest.raises(PayloadTooLarge):
        await scene.dispatcher.dispatch(RequestMessages(opening, WORK, {}))
    assert scene.first.opened == []
