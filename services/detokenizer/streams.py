"""The life of streams: `open`, `attach`, `apply`, then `finish`, `cancel` or `abort`; see `StreamState`."""

import asyncio

import structlog

from pagewire.services.detokenizer.finalizer import AbortNotifier, Finalizer
from pagewire.services.detokenizer.frame_sender import DisconnectMonitor, FrameSender
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.step_feed import SequenceMap
from pagewire.services.detokenizer.stream import Choice, Stream, StreamState, Subscriber, open_choices
from pagewire.shared import subjects, telemetry
from pagewire.shared.bus import Headers
from pagewire.shared.errors import DeadlineExceeded, Internal, RequestError, Unavailable
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.client import Accepted
from pagewire.shared.messages.open import OpenState, OpenStream
from pagewire.shared.messages.step import Finish, StepOutput
from pagewire.shared.vocabulary import Vocabulary

MAX_SUBSCRIBERS = 64
"""Subscribers of one stream at once; one more replaces the oldest."""

MAX_LOST_SCHEDULERS = 5
"""Schedulers in a row that have lost a request without a new token, after which the request ends with an error."""

NOT_FINITE = "the model's logits are NaN or infinite, so no token can be sampled: check the weights and the dtype"

_log = structlog.get_logger()


class Streams:
    """Every request whose client this instance sends frames to.

    Attributes:
        tokens: tokens received so far.
    """

    def __init__(
        self,
        instance: str,
        registry: Registry,
        sender: FrameSender,
        monitor: DisconnectMonitor,
        notifier: AbortNotifier,
        finalizer: Finalizer,
    ) -> None:
        self.tokens = 0
        self._instance = instance
        self._registry = registry
        self._sender = sender
        self._monitor = monitor
        self._notifier = notifier
        self._finalizer = finalizer
        self._sequences = SequenceMap()

    async def open(self, request: OpenStream, vocabulary: Vocabulary, headers: Headers) -> OpenState:
        """Opens a stream, or adds a subscriber to the stream of the same request id.

        A request that ended with `Unavailable` starts again.

        Raises:
            BusError: it cannot be determined whether the id is new.
        """
        if request.fresh:
            stream = self._registry.find(request.request_id)
        else:
            stream = await self._registry.recall(request.request_id)
        if stream is not None and not _may_start_again(stream):
            return self._join(stream, request)
        if self._registry.full:
            return OpenState.FULL
        stream = Stream(
            request_id=request.request_id,
            digest=request.digest,
            completions=open_choices(vocabulary, request),
            prompt_tokens=sum(unpack(request.prompt_lengths)),
            prompts=request.prompts if request.prompt_logprobs else (),
            span=telemetry.tracer().start_span("stream", context=telemetry.extract(headers)),
        )
        loop = asyncio.get_running_loop()
        late = DeadlineExceeded("timeout_ms has passed: allow more time or ask for fewer tokens")
        stream.deadline = loop.call_later(request.timeout_ms / 1000, self.abort, stream, late, AbortReason.DEADLINE)
        self._registry.add(stream)
        self._subscribe(stream, request)
        return OpenState.OPENED

    def attach(self, stream: Stream, attach: Attach) -> Attached:
        """Binds a stream to the sequences of a scheduler. Of the tokens known here and there, the longer list wins."""
        if stream.state is not StreamState.OPEN:
            if stream.state is StreamState.ENDED:
                self._finalizer.end_work(attach.ack)
            stream.attachment = attach
            return _attached(stream, AttachState.ENDED)
        before = stream.attachment
        if before is not None:
            if (attach.generation, attach.term) < (before.generation, before.term):
                return Attached(AttachState.UNKNOWN, (), b"")
            if before.scheduler != attach.scheduler:
                # If the scheduler was only frozen, it would go on with sequences that nobody needs.
                self._abort_sequences(stream, AbortReason.SUPERSEDED)
            self._sequences.unbind(stream, before)
        stream.attachment = attach
        if Finish.NOT_FINITE in attach.finishes:
            self.abort(stream, Internal(NOT_FINITE))
            return _attached(stream, AttachState.ENDED)
        choices = stream.choices
        for index, (choice, tokens) in enumerate(zip(choices, attach.tokens, strict=True)):
            finish = attach.finishes[index] if attach.finishes else Finish.NONE
            self._accept_known(choice, unpack(tokens), finish)
        self._sequences.bind(stream, choices, attach)
        if before is not None and before.scheduler != attach.scheduler:
            stream.note_lost_scheduler()
            if stream.lost_schedulers >= MAX_LOST_SCHEDULERS:
                self.abort(stream, Internal("services stop whenever they run this request: change the request"))
                return _attached(stream, AttachState.ENDED)
        answer = _attached(stream, AttachState.ENDED if stream.finished else AttachState.OPEN)
        self._send(stream)
        if stream.finished:
            self._finish(stream)
        return answer

    def apply(self, output: StepOutput) -> None:
        """Appends the tokens of a step, sends their frames, and finishes what the step has ended."""
        effects = self._sequences.apply(output)
        self.tokens += effects.tokens
        for stream, sequences in effects.stopped.items():
            assert stream.attachment is not None
            self._notifier.abort(stream.attachment, sequences, AbortReason.STOP_STRING)
        for stream in effects.touched:
            self._sender.enqueue(stream)
        for stream in effects.ended:
            if stream.finished and stream.state is StreamState.OPEN:
                self._finish(stream)
        for stream in effects.not_finite:
            self.abort(stream, Internal(NOT_FINITE))
        for stream in effects.gapped:
            self.abort(stream, Unavailable("tokens of the request were lost: send it again"))
        self._sender.drain()

    def cancel(self, stream: Stream) -> bool:
        """Ends a stream where it is; returns False if it was over before."""
        if stream.state is not StreamState.OPEN:
            return False
        self._abort_sequences(stream, AbortReason.CANCELLED)
        for choice in stream.choices:
            choice.cancel()
        self._finish(stream)
        return True

    def abort(self, stream: Stream, error: RequestError, reason: AbortReason = AbortReason.CANCELLED) -> None:
        """Ends a stream with an error, unless it was over before. The scheduler is told `reason`."""
        if stream.state is StreamState.OPEN:
            stream.error = error
            self._abort_sequences(stream, reason)
            self._finish(stream)

    def abort_all(self) -> None:
        """Ends every open stream with an error, as the service stops."""
        for stream in list(self._registry.open):
            self.abort(stream, Unavailable("the service stops: send the request again"))

    def on_scheduler_ended(self, scheduler: str) -> None:
        """Returns the work of a scheduler whose process has ended to the queue, for another one to take at once."""
        for stream in self._registry.open:
            if stream.state is StreamState.OPEN and stream.attachment and stream.attachment.scheduler == scheduler:
                self._finalizer.return_work(stream.attachment.ack)

    def resume(self, stream: Stream, reply: str, encoding: int, start: int) -> None:
        """Sends the frames from position `start` on, to a known or a new subscriber."""
        known = stream.find_subscriber(reply)
        if known is not None and known.streaming:
            known.rewind(start)
            self._send(stream)
        else:
            self._add(Subscriber(stream, reply, encoding, streaming=True, start=start))

    def check_disconnects(self) -> None:
        """Removes subscribers that have disconnected, and cancels the streams that have none left."""
        subscribers = (subscriber for stream in self._registry.open for subscriber in stream.subscribers)
        for subscriber in self._monitor.check(subscribers):
            stream = subscriber.stream
            stream.unsubscribe(subscriber)
            if not stream.subscribers and self.cancel(stream):
                _log.info("client_gone", request_id=stream.request_id)

    def keep_alive(self) -> None:
        """Tells the subscribers of streams without a token that their requests still wait."""
        for stream in self._registry.open:
            if stream.state is StreamState.OPEN and not stream.tokens:
                self._sender.keep_alive(stream)

    def _join(self, stream: Stream, request: OpenStream) -> OpenState:
        """Adds a subscriber to a stream that exists, or starts the stream again for a known one."""
        if stream.digest != request.digest:
            return OpenState.CONFLICT
        known = stream.find_subscriber(request.reply)
        if known is not None:
            known.rewind(0, self._accepted(stream))
            self._send(stream)
        else:
            self._subscribe(stream, request)
        # A known subscriber without an attachment: the tokenizer may have missed the answer and not stored the work.
        stored = known is None or stream.attachment is not None or stream.state is not StreamState.OPEN
        return OpenState.ATTACHED if stored else OpenState.OPENED

    def _subscribe(self, stream: Stream, request: OpenStream) -> None:
        self._add(
            Subscriber(
                stream,
                request.reply,
                request.encoding,
                streaming=request.stream,
                accepted=self._accepted(stream) if request.stream else None,
                batch_inbox=request.batch_inbox,
            )
        )

    def _add(self, subscriber: Subscriber) -> None:
        stream = subscriber.stream
        if len(stream.subscribers) >= MAX_SUBSCRIBERS:
            stream.unsubscribe(stream.subscribers[0])
        stream.subscribers.append(subscriber)
        self._send(stream)

    def _send(self, stream: Stream) -> None:
        self._sender.enqueue(stream)
        self._sender.drain()

    def _accepted(self, stream: Stream) -> Accepted:
        cancel, resume = (f"{verb}.{self._instance}.{stream.request_id}" for verb in (subjects.CANCEL, subjects.RESUME))
        return Accepted(stream.request_id, cancel, resume, stream.prompt_tokens)

    def _accept_known(self, choice: Choice, tokens: list[int], finish: int) -> None:
        """Appends the tokens that only the scheduler knows, as if they had just been generated.

        Without their log-probabilities they are not wanted: the scheduler has them generated again.
        """
        if choice.logprobs is not None or choice.prompt_logprobs:
            return
        last = len(tokens) - 1
        for position in range(len(choice.tokens), len(tokens)):
            self.tokens += choice.accept(position, tokens[position], finish if position == last else Finish.NONE)

    def _abort_sequences(self, stream: Stream, reason: AbortReason) -> None:
        """Has the scheduler abort the sequences of a stream that have not ended."""
        attach = stream.attachment
        if attach is not None:
            completions = enumerate(stream.completions, attach.first_sequence)
            live = [sequence for sequence, completion in completions if completion.finish is None]
            if live:
                self._notifier.abort(attach, live, reason)

    def _finish(self, stream: Stream) -> None:
        """Ends an open stream: no row belongs to it any more, and it is finalized."""
        if stream.attachment is not None:
            self._sequences.unbind(stream, stream.attachment)
        self._finalizer.start(stream)


def _may_start_again(stream: Stream) -> bool:
    """Returns whether a stream ended because a service was missing: its client is told to send the request again."""
    return stream.state is StreamState.ENDED and isinstance(stream.error, Unavailable)


def _attached(stream: Stream, state: AttachState) -> Attached:
    ended = [index for index, completion in enumerate(stream.completions) if completion.finish is not None]
    return Attached(state, tuple(pack(completion.tokens) for completion in stream.completions), pack(ended))
