"""Adopts the streams of detokenizers that are gone or about to end, and settles which detokenizer owns a stream.

    request   who notices                                  what the stream is rebuilt from
    running   its scheduler, which sends an `Attach`       the opening and the tokens in the `Attach`
    queued    `Adopter.run`, which reads the queues        the opening in the work item

Two detokenizers that have one stream compare their attachments (`_on_adopted`): the newer one owns it, the other drops
it. Without any attachment, the first in rank for the request id owns it.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream, StreamState
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Headers, Message, Subscription
from pagewire.shared.errors import BusError, NoResponders, Unavailable
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.adopted import Adopted
from pagewire.shared.messages.attach import AttachOrder
from pagewire.shared.messages.open import OpenStream
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.process.peers import Peers
from pagewire.shared.rendezvous import rank
from pagewire.shared.vanished_items import VanishedItems

OBJECTION_TIME = 0.25
"""Seconds that others have to object before the streams of queued requests are opened here."""
LOOK_INTERVAL = 1.0
"""Seconds between two checks of the queues."""
LOOK_FOR = 8.0
"""Seconds for which the queues are looked through after a detokenizer has come or gone: a tokenizer may still store a
request whose stream was open there."""
UNSTORED_AFTER = 20.0
"""Seconds without an attachment after which a stream whose request is in no queue ends. Its client, which has heard
nothing, has time to send the request again: a client that waits for a result does so after 15 s."""
CHECK_INTERVAL = 2.0
"""Seconds between two checks for streams whose request may be in no queue."""
PING_TIMEOUT = 0.5
"""Seconds that an instance without any heartbeat so far has to answer a ping."""
MAX_ANNOUNCED = 500
"""Maximum number of streams in one `Adopted`."""
MAX_RECALLS = 16
"""Records of ended requests that are read at a time."""

NOT_ATTACHED: AttachOrder = (0, 0, 0)
"""Order of a stream that no scheduler has attached."""
ENDED: AttachOrder = (0xFFFF_FFFF,) * 3
"""Order of a stream that has ended: no `Attach` is newer."""


_log = structlog.get_logger()
_work = Decoder(WorkItem)
_opening = Decoder(OpenStream)
_adopted = Decoder(Adopted)


@dataclass(frozen=True, slots=True)
class _Orphan:
    """The stream of a queued request whose detokenizer is gone."""

    opening: OpenStream
    headers: Headers
    """Headers of the work item, with the trace context."""
    number: int
    """Number of the work item."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """State of a live detokenizer, from its last heartbeat."""

    ready: bool
    draining: bool


class Adopter:
    """Settles with the other detokenizers who owns which stream.

    Attributes:
        ready: whether this detokenizer takes streams.
        draining: whether this detokenizer gives its streams away.
    """

    def __init__(self, bus: Bus, peers: Peers, instance: str, registry: Registry, streams: Streams) -> None:
        self.ready = False
        self.draining = False
        self._bus = bus
        self._instance = instance
        self._registry = registry
        self._streams = streams
        self._changed = asyncio.Event()
        self._peers = peers
        self._view: dict[str, _Peer] = {}
        """Live detokenizers by instance id, as of the last turn of `run`. It does not change during a look through the
        queues: a detokenizer that comes meanwhile causes another look, even if it is gone by then."""
        self._claimed: dict[str, _Orphan] = {}
        """Orphans by request id that are opened here unless another detokenizer objects."""

    @property
    def has_peer(self) -> bool:
        """Whether another detokenizer is there that takes streams."""
        alive = self._peers.alive("detokenizer")
        return any(beat.ready and not beat.draining for beat in alive if beat.instance != self._instance)

    async def listen(self) -> list[Subscription]:
        """Subscribes to the heartbeats and the announcements of detokenizers."""
        return [
            await self._peers.listen("detokenizer", self._changed.set),
            await self._bus.subscribe(f"{subjects.ADOPTED}.*", self._on_adopted),
        ]

    def announce(self, streams: Iterable[Stream]) -> None:
        """Claims these streams: the other detokenizers drop or object."""
        self._publish({stream.request_id: _order(stream) for stream in streams})

    async def run(self, model: str, vocabulary: Vocabulary) -> None:
        """Adopts the streams of queued requests until cancelled. `model` is the model's token in subjects."""
        vanished = VanishedItems(self._bus, subjects.all_work(model))
        after = 0
        look_until, next_look, next_check = time.monotonic() + LOOK_FOR, 0.0, 0.0
        while True:
            alive, now = self._peers.alive("detokenizer"), time.monotonic()
            view = {beat.instance: _Peer(beat.ready, beat.draining) for beat in alive}
            if view != self._view:
                if view.keys() - self._view.keys():
                    self.announce(stream for stream in self._registry.open if stream.adopted)
                self._view, after, look_until, next_look = view, 0, now + LOOK_FOR, now
            unstored: list[Stream] = []
            if now >= next_check:
                next_check = now + CHECK_INTERVAL
                await self._end_vanished(vanished)
                unstored = [stream for stream in self._registry.open if _may_be_unstored(stream, now)]
            if self.ready and not self.draining and (unstored or next_look <= now < look_until):
                next_look = now + LOOK_INTERVAL
                after = await self._look(model, after, vocabulary, unstored)
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_INTERVAL / 4):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _look(self, model: str, after: int, vocabulary: Vocabulary, unstored: list[Stream]) -> int:
        """Looks through the work items behind number `after`: adopts orphans, and ends those of `unstored` that it does
        not find.

        Returns the number of the last item; 0, to begin anew, if it is unknown whether a detokenizer is gone, or if a
        stream could not be opened.
        """
        orphans: list[_Orphan] = []
        gone: dict[str, bool | None] = {}
        try:
            while items := await self._bus.store.list_work(subjects.all_work(model), after):
                for item in items:
                    after = item.sequence
                    work = _work.try_decode(item.data)
                    if work is None:
                        continue
                    stream = self._find(work.request_id)
                    if stream is not None:
                        self._streams.note_stored(stream, item.sequence)
                        if self._belongs_to_another(stream, work.detokenizer):
                            self._streams.drop(stream)
                        continue
                    if work.detokenizer not in gone:
                        gone[work.detokenizer] = await self._is_gone(work.detokenizer)
                    if gone[work.detokenizer] and work.opening and self.is_first(work.request_id):
                        opening = _opening.try_decode(work.opening)
                        if opening is not None:
                            orphans.append(_Orphan(opening, item.headers, item.sequence))
            for stream in unstored:
                if not stream.accepted:
                    await self._end_lost(stream, "the request was not queued: send it again")
        except BusError as error:
            _log.warning("queues_not_read", reason=str(error), retry_in=LOOK_INTERVAL)
            return 0
        opened = not orphans or await self._adopt(orphans, vocabulary)
        return after if opened and None not in gone.values() else 0

    def _find(self, request_id: str) -> Stream | None:
        """Returns the stream in memory, unless it may start again: another detokenizer may have started it."""
        stream = self._registry.find(request_id)
        return None if stream is not None and stream.may_start_again else stream

    def _belongs_to_another(self, stream: Stream, owner: str) -> bool:
        """Returns whether the tokenizer has opened the stream at a live `owner` instead, as this one did not answer."""
        if stream.adopted or stream.state is not StreamState.OPEN or stream.attachment is not None:
            return False
        beat = self._peers.find(owner)
        return owner != self._instance and beat is not None and beat.ready

    async def _end_lost(self, stream: Stream, message: str) -> None:
        """Ends a stream whose request is in no queue, unless that changes while its record is read."""
        before = stream.accepted, stream.number
        record = await self._bus.store.get_done(stream.request_id)
        if self._registry.find(stream.request_id) is not stream or stream.state is not StreamState.OPEN:
            return  # it is over, or another detokenizer owns it
        if (stream.accepted, stream.number) != before or not self._needs_item(stream):
            return
        if record is not None:
            self._streams.drop(stream)  # another detokenizer has served the request
            return
        _log.error("request_in_no_queue", request_id=stream.request_id, number=stream.number)
        self._streams.abort(stream, Unavailable(message))

    async def _end_vanished(self, vanished: VanishedItems) -> None:
        """Ends the streams of requests without a scheduler whose work items have vanished: nobody would serve them.

        The items of all others are checked as well, so that one check is enough when a scheduler is gone, which may
        have stored the item again, with another number.
        """
        streams = {stream.request_id: stream for stream in self._registry.open if stream.number}
        try:
            missing = await vanished.find({request_id: stream.number for request_id, stream in streams.items()})
            missing = {request_id for request_id in missing if self._needs_item(streams[request_id])}
            restored = await vanished.stored(missing)
            for request_id in missing:
                stream = streams[request_id]
                if request_id in restored:
                    self._streams.note_stored(stream, restored[request_id])
                elif self._needs_item(stream) and stream.state is StreamState.OPEN:
                    await self._end_lost(stream, "the request has vanished from the queue: send it again")
        except BusError as error:
            _log.warning("queues_not_read", reason=str(error), retry_in=CHECK_INTERVAL)

    def _needs_item(self, stream: Stream) -> bool:
        """Returns whether only the work item can bring a request to a scheduler: it waits, or its scheduler is gone."""
        return stream.attachment is None or self._peers.gone(stream.attachment.scheduler)

    async def _is_gone(self, instance: str) -> bool | None:
        """Returns whether a detokenizer is gone or gives its streams away; None if that is not known yet."""
        if instance == self._instance:
            return False
        peer, lives = self._view.get(instance), self._peers.find(instance) is not None
        if peer is not None and lives:
            return peer.draining
        if self._peers.gone(instance):
            return True
        if peer is not None or lives:
            return None
        try:
            await self._bus.request(f"{subjects.DETOKENIZER}.{instance}.ping", b"", timeout=PING_TIMEOUT)
        except NoResponders:
            return True
        except BusError:
            return None
        return None

    def is_first(self, request_id: str) -> bool:
        """Returns whether this detokenizer ranks first for a request id among those that are ready."""
        ready = {instance for instance, peer in self._view.items() if peer.ready}
        return rank(request_id, ready | {self._instance})[0] == self._instance

    async def _adopt(self, orphans: list[_Orphan], vocabulary: Vocabulary) -> bool:
        """Opens the streams of orphans, unless another detokenizer objects; returns False if one cannot be opened."""
        self._claimed = {orphan.opening.request_id: orphan for orphan in orphans}
        self._publish(dict.fromkeys(self._claimed, NOT_ATTACHED))
        await asyncio.sleep(OBJECTION_TIME)
        claimed, self._claimed = list(self._claimed.values()), {}
        all_open = True
        for start in range(0, len(claimed), MAX_RECALLS):
            batch = [self._open(orphan, vocabulary) for orphan in claimed[start : start + MAX_RECALLS]]
            all_open &= all(await asyncio.gather(*batch))
        return all_open

    async def _open(self, orphan: _Orphan, vocabulary: Vocabulary) -> bool:
        """Opens the stream of an orphan; returns False if that is not possible now."""
        if self._find(orphan.opening.request_id) is not None:
            return True  # its scheduler has attached it meanwhile
        if self._registry.full:
            return False
        try:
            stream = await self._streams.adopt(orphan.opening, vocabulary, orphan.headers)
        except BusError as error:
            _log.warning("stream_not_adopted", request_id=orphan.opening.request_id, reason=str(error))
            return False
        self._streams.note_stored(stream, orphan.number)
        return True

    def _publish(self, orders: dict[str, AttachOrder]) -> None:
        """Claims the streams of these requests, each with the order of its attachment."""
        request_ids = list(orders)
        for start in range(0, len(request_ids), MAX_ANNOUNCED):
            batch = request_ids[start : start + MAX_ANNOUNCED]
            numbers = pack(number for request_id in batch for number in orders[request_id])
            adopted = Adopted(self._instance, tuple(batch), numbers)
            try:
                self._bus.publish(f"{subjects.ADOPTED}.{self._instance}", encode(adopted))
            except BusError as error:
                _log.warning("adoption_not_announced", reason=str(error))

    def _on_adopted(self, message: Message) -> None:
        """Drops the streams that the sender owns, and objects for the streams that this detokenizer owns."""
        adopted = _adopted.read(message)
        if adopted is None or adopted.instance == self._instance:
            return
        numbers = iter(unpack(adopted.attachments))
        objections = []
        for request_id, theirs in zip(adopted.request_ids, zip(numbers, numbers, numbers, strict=True), strict=True):
            stream = self._find(request_id)
            ours = _order(stream) if stream is not None else NOT_ATTACHED
            if self._yields(request_id, ours, theirs, adopted.instance):
                self._claimed.pop(request_id, None)
                if stream is not None:
                    self._streams.drop(stream)
            elif stream is not None:
                objections.append(stream)
        if objections:
            self.announce(objections)

    def _yields(self, request_id: str, ours: AttachOrder, theirs: AttachOrder, instance: str) -> bool:
        """Returns whether another `instance` owns the stream: the newer attachment does, of equal ones the first in
        rank."""
        if ours == ENDED or theirs != ours:
            return ours != ENDED and theirs > ours
        return self.draining or rank(request_id, [self._instance, instance])[0] == instance


def _order(stream: Stream) -> AttachOrder:
    if stream.state is not StreamState.OPEN:
        return ENDED
    return NOT_ATTACHED if stream.attachment is None else stream.attachment.order


def _may_be_unstored(stream: Stream, now: float) -> bool:
    """Returns whether a stream has waited so long that its request may be in no queue."""
    return not stream.accepted and now - stream.opened_at > UNSTORED_AFTER
