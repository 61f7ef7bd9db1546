"""What happens to streams: they open, are attached to sequences, grow, and end."""

import asyncio

import structlog

from pagewire.services.detokenizer.choice import Choice, open_choices
from pagewire.services.detokenizer.ending import Ending
from pagewire.services.detokenizer.finisher import Finisher
from pagewire.services.detokenizer.mailbox import Mailbox, Outbox
from pagewire.services.detokenizer.presence import Presence
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.routes import Routes
from pagewire.services.detokenizer.stream import Stream, StreamState
from pagewire.services.detokenizer.vocabulary import Vocabulary
from pagewire.shared import subjects, telemetry
from pagewire.shared.bus import Headers
from pagewire.shared.errors import DeadlineExceeded, RequestError, Unavailable
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.client import Accepted
from pagewire.shared.messages.finish import FinishReason
from pagewire.shared.messages.open import OpenState, OpenStream
from pagewire.shared.messages.step import Finish, StepOutput

MAX_READERS = 64
"""Readers of one stream at a time; the oldest goes for one more."""

_log = structlog.get_logger()


class Streams:
    """Every request whose client this instance speaks to.

    Attributes:
        tokens: tokens taken in so far.
    """

    def __init__(
        self,
        instance: str,
        registry: Registry,
        outbox: Outbox,
        presence: Presence,
        finisher: Finisher,
        ending: Ending,
    ) -> None:
        self.tokens = 0
        self._instance = instance
        self._registry = registry
        self._outbox = outbox
        self._presence = presence
        self._finisher = finisher
        self._ending = ending
        self._routes = Routes()

    async def open(self, request: OpenStream, vocabulary: Vocabulary, headers: Headers) -> OpenState:
        """Opens a stream, or adds a reader to the one of that id.

        Raises:
            BusError: it cannot be told whether the id is new.
        """
        if request.fresh:
            stream = self._registry.find(request.request_id)
        else:
            stream = await self._registry.recall(request.request_id)
        if stream is not None:
            return self._join(stream, request)
        if self._registry.full:
            return OpenState.FULL
        stream = Stream(
            request_id=request.request_id,
            digest=request.digest,
            completions=open_choices(vocabulary, request),
            prompt_tokens=sum(unpack(request.prompt_lengths)),
            span=telemetry.tracer().start_span("stream", context=telemetry.extract(headers)),
        )
        loop = asyncio.get_running_loop()
        stream.deadline = loop.call_later(request.timeout_ms / 1000, self._expire, stream)
        self._registry.add(stream)
        self._read(stream, request)
        return OpenState.OPENED

    def attach(self, stream: Stream, attach: Attach) -> Attached:
        """Binds a stream to sequences. Of the tokens known here and there, the longer list wins."""
        if stream.state is not StreamState.OPEN:
            if stream.state is StreamState.ENDED:
                self._ending.end_item(attach.ack)
            stream.attachment = attach
            return _attached(stream, AttachState.ENDED)
        before = stream.attachment
        if before is not None:
            if (attach.generation, attach.term) < (before.generation, before.term):
                return Attached(AttachState.UNKNOWN, (), b"")
            if before.scheduler != attach.scheduler:
                self._finish_rest(stream, FinishReason.SUPERSEDED)  # if it was only frozen, it works for nobody now
            self._routes.unbind(stream, before)
        stream.attachment = attach
        choices = _choices(stream)
        for index, (choice, tokens) in enumerate(zip(choices, attach.tokens, strict=True)):
            self._take_over(choice, unpack(tokens), attach.finishes[index] if attach.finishes else Finish.NONE)
        self._routes.bind(stream, choices, attach)
        answer = _attached(stream, AttachState.ENDED if stream.finished else AttachState.OPEN)
        self._send(stream)
        if stream.finished:
            self._end(stream)
        return answer

    def apply(self, output: StepOutput) -> None:
        """Takes in a step."""
        progress = self._routes.apply(output)
        self.tokens += progress.tokens
        for stream, sequences in progress.stopped.items():
            assert stream.attachment is not None
            self._finisher.finish(stream.attachment, sequences, FinishReason.STOP_STRING)
        for stream in progress.touched:
            self._outbox.post(stream)
        for stream in progress.ended:
            if stream.finished and stream.state is StreamState.OPEN:
                self._end(stream)
        for stream in progress.gapped:
            self._fail(stream, Unavailable("tokens of the request were lost: send it again"), FinishReason.CANCELLED)
        self._outbox.drain()

    def cancel(self, stream: Stream) -> bool:
        """Ends a stream where it stands; False if it has ended before."""
        if stream.state is not StreamState.OPEN:
            return False
        self._finish_rest(stream, FinishReason.CANCELLED)
        for choice in _choices(stream):
            choice.cancel()
        self._end(stream)
        return True

    def abandon(self, stream: Stream, error: RequestError) -> None:
        """Ends a stream whose work was never stored."""
        self._fail(stream, error, FinishReason.CANCELLED)

    def resume(self, stream: Stream, reply: str, encoding: int, start: int) -> None:
        """Sends the frames from position `start` on, to a reader that is known or to another one."""
        known = stream.reader(reply)
        if known is not None and known.streaming:
            known.rewind(start)
            self._send(stream)
        else:
            self._add(Mailbox(stream, reply, encoding, streaming=True, start=start))

    def close(self) -> None:
        """Ends every open stream: the service stops."""
        for stream in list(self._registry.open):
            self._fail(stream, Unavailable("the service stops: send the request again"), FinishReason.CANCELLED)

    def look_for_readers(self) -> None:
        """Lets go of readers that are gone, and cancels a stream with its last one."""
        readers = (reader for stream in self._registry.open for reader in stream.mailboxes)
        for reader in self._presence.look(readers):
            stream = reader.stream
            stream.drop(reader)
            if not stream.mailboxes and self.cancel(stream):
                _log.info("client_gone", request_id=stream.request_id)

    def keep_alive(self) -> None:
        """Tells the clients of streams without a token that they are waiting still."""
        for stream in self._registry.open:
            if stream.state is StreamState.OPEN and not stream.tokens:
                self._outbox.keep_alive(stream)

    def _join(self, stream: Stream, request: OpenStream) -> OpenState:
        """Another reader for a stream, or the same one once more: then the tokenizer may have missed the answer."""
        if stream.digest != request.digest:
            return OpenState.CONFLICT
        known = stream.reader(request.reply)
        if known is not None:
            known.rewind(0, self._accepted(stream))
            self._send(stream)
        else:
            self._read(stream, request)
        stored = known is None or stream.attachment is not None or stream.state is not StreamState.OPEN
        return OpenState.ATTACHED if stored else OpenState.OPENED

    def _read(self, stream: Stream, request: OpenStream) -> None:
        greeting = self._accepted(stream) if request.stream else None
        self._add(
            Mailbox(
                stream,
                request.reply,
                request.encoding,
                streaming=request.stream,
                greeting=greeting,
                batch_inbox=request.batch_inbox,
            )
        )

    def _add(self, mailbox: Mailbox) -> None:
        stream = mailbox.stream
        if len(stream.mailboxes) >= MAX_READERS:
            stream.drop(stream.mailboxes[0])
        stream.mailboxes.append(mailbox)
        self._send(stream)

    def _send(self, stream: Stream) -> None:
        self._outbox.post(stream)
        self._outbox.drain()

    def _accepted(self, stream: Stream) -> Accepted:
        cancel, resume = (f"{verb}.{self._instance}.{stream.request_id}" for verb in (subjects.CANCEL, subjects.RESUME))
        return Accepted(stream.request_id, cancel, resume, stream.prompt_tokens)

    def _take_over(self, choice: Choice, tokens: list[int], finish: int) -> None:
        """Takes in what the scheduler knows, as if it had just been generated."""
        last = len(tokens) - 1
        for position in range(len(choice.tokens), len(tokens)):
            self.tokens += choice.accept(position, tokens[position], finish if position == last else Finish.NONE)

    def _expire(self, stream: Stream) -> None:
        error = DeadlineExceeded("timeout_ms has passed: allow more time or ask for fewer tokens")
        self._fail(stream, error, FinishReason.DEADLINE)

    def _fail(self, stream: Stream, error: RequestError, reason: FinishReason) -> None:
        if stream.state is StreamState.OPEN:
            stream.error = error
            self._finish_rest(stream, reason)
            self._end(stream)

    def _finish_rest(self, stream: Stream, reason: FinishReason) -> None:
        """Has the sequences dropped that the device still runs."""
        attach = stream.attachment
        if attach is not None:
            completions = enumerate(stream.completions, attach.first_sequence)
            live = [sequence for sequence, completion in completions if completion.finish is None]
            if live:
                self._finisher.finish(attach, live, reason)

    def _end(self, stream: Stream) -> None:
        if stream.attachment is not None:
            self._routes.unbind(stream, stream.attachment)
        self._ending.begin(stream)


def _choices(stream: Stream) -> list[Choice]:
    """The completions of a stream that is open."""
    return [completion for completion in stream.completions if isinstance(completion, Choice)]


def _attached(stream: Stream, state: AttachState) -> Attached:
    ended = [index for index, completion in enumerate(stream.completions) if completion.finish is not None]
    return Attached(state, tuple(pack(completion.tokens) for completion in stream.completions), pack(ended))
