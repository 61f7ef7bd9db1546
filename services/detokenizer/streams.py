"""The life of streams, whose states `StreamState` draws: opened or adopted, attached, fed, ended or dropped.

This detokenizer owns the text, frames, deadline and cancel of each stream. Nothing of it is stored while it lasts:
another detokenizer rebuilds it from the opening, which the work item carries, and from the scheduler's tokens.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog
from msgspec import UNSET

from pagewire.services.detokenizer.abort_notifier import AbortNotifier
from pagewire.services.detokenizer.finalizer import Finalizer
from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.metrics import StreamMetrics
from pagewire.services.detokenizer.sequence_map import SequenceMap
from pagewire.services.detokenizer.state.completion import StreamedChoice, open_choices
from pagewire.services.detokenizer.state.outcome import Times
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream, StreamState, Subscriber
from pagewire.services.detokenizer.step_feed import StepFeed
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared import subjects
from pagewire.shared.bus import Headers
from pagewire.shared.errors import DeadlineExceeded, Internal, InvalidRequest, RequestError, Unavailable
from pagewire.shared.grammar_limits import MAX_LEXER_STATES, MAX_LEXER_STEPS, MAX_PARSER_ITEMS
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.attach import NEW, Attach, Attached, AttachState
from pagewire.shared.messages.client import Accepted
from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.open import OpenState, OpenStream
from pagewire.shared.messages.step import ERRORS, Finish, StepOutput
from pagewire.shared.process.peers import Peers
from pagewire.shared.telemetry import tracing

MAX_SUBSCRIBERS = 64
"""Maximum subscribers of one stream; one more replaces the oldest."""
MAX_LOST_SCHEDULERS = 5
"""Schedulers that have ended with a request since its last new token, after which the request ends with an error."""
NOT_FINITE = "no token can be sampled: the model's logits are NaN or infinite (check the weights and the dtype)"
GRAMMAR_LIMIT = (
    "the grammar of structured_outputs or tools is too complex to go on behind this text. A text may need "
    f"{MAX_LEXER_STATES:,} states of regular expressions, and each token {MAX_LEXER_STEPS:,} steps of these and "
    f"{MAX_PARSER_ITEMS:,} items of the parser: simplify the patterns, or repeat them less often"
)

_log = structlog.get_logger()


class Streams:
    """All streams that this detokenizer owns."""

    def __init__(
        self,
        instance: str,
        registry: Registry,
        sender: FrameSender,
        notifier: AbortNotifier,
        finalizer: Finalizer,
        steps: StepFeed,
        metrics: StreamMetrics,
        peers: Peers,
        now: Callable[[], float],
    ) -> None:
        """`now`: the store's."""
        self._metrics = metrics
        self._peers = peers
        self._now = now
        self._instance = instance
        self._registry = registry
        self._sender = sender
        self._notifier = notifier
        self._finalizer = finalizer
        self._steps = steps
        self._sequences = SequenceMap()

    async def open(self, request: OpenStream, vocabulary: Vocabulary, headers: Headers) -> OpenState:
        """Opens a stream, or adds a subscriber to the stream of the same request id.

        A request that ended without an answer starts again.

        Raises:
            BusError: it cannot be determined whether the id is new.
        """
        if request.fresh:
            stream = self._registry.find(request.request_id)
        else:
            stream = await self._registry.recall(request.request_id)
        if stream is not None and not stream.may_start_again:
            return self._join(stream, request)
        if request.joins:
            return OpenState.ABSENT
        if self._registry.full:
            return OpenState.FULL
        self._subscribe(self._add_stream(request, vocabulary, headers, request.timeout_ms / 1000), request)
        return OpenState.OPENED

    async def adopt(
        self, request: OpenStream, vocabulary: Vocabulary, headers: Headers, sent: Sequence[int] = ()
    ) -> Stream:
        """Returns the stream of a request that another detokenizer owned; opens it if it is not here.

        A request that ended here without an answer starts again. `sent` is the number of tokens per choice that the
        client has received. If the request has ended otherwise, the client gets the whole stream again, because it is
        unknown whether it has received the end.

        Raises:
            BusError: it cannot be determined whether the request has ended.
        """
        stream = await self._registry.recall(request.request_id)
        if stream is None or stream.may_start_again:
            left = max(0.0, request.deadline - self._now()) if request.deadline else request.timeout_ms / 1000
            stream = self._add_stream(request, vocabulary, headers, left)
            stream.adopted = True
            self._metrics.adopted += 1
            self._subscribe(stream, request, sent)
            _log.info("stream_adopted", request_id=stream.request_id)
        elif stream.state is StreamState.ENDED and not stream.subscribers and stream.digest == request.digest:
            self._subscribe(stream, request)
        return stream

    def drop(self, stream: Stream) -> None:
        """Forgets an open stream without a word to anybody: another detokenizer owns it."""
        if stream.attachment is not None:
            self._sequences.unbind(stream, stream.attachment)
        if stream.deadline is not None:
            stream.deadline.cancel()
        for subscriber in list(stream.subscribers):
            stream.unsubscribe(subscriber)
        self._registry.drop(stream)
        _log.info("stream_dropped", request_id=stream.request_id)

    def attach(self, stream: Stream, attach: Attach) -> Attached:
        """Binds a stream to the sequences of a scheduler. The longer list of tokens, here or there, counts for both."""
        if stream.state is not StreamState.OPEN:
            if stream.state is StreamState.ENDED:
                self._finalizer.end_work(attach.ack)
            stream.attachment = attach
            return _attached(stream, AttachState.ENDED)
        before = stream.attachment
        if before is not None:
            if attach.order < before.order:
                return Attached(AttachState.STALE, (), b"")
            if before.scheduler != attach.scheduler:
                # If the scheduler was only frozen, it would go on with sequences that nobody needs.
                self._abort_sequences(stream, AbortReason.SUPERSEDED)
            self._sequences.unbind(stream, before)
        stream.attachment = attach
        stream.incomplete = False
        choices, failed = stream.choices, Finish.NONE
        for index, (choice, tokens) in enumerate(zip(choices, attach.tokens, strict=True)):
            finish = Finish(attach.finishes[index]) if attach.finishes else Finish.NONE
            if tokens and attach.cumulative_logprobs:
                choice.score = attach.cumulative_logprobs[index]
            reported = attach.logprobs[index] if attach.logprobs else ()
            self._accept_known(choice, unpack(tokens), finish, reported)
            if finish in ERRORS and choice.finish is None:
                failed = finish
        if failed:
            self.abort(stream, _error_of(failed, stream.adapter))
            return _attached(stream, AttachState.ENDED)
        self._sequences.bind(stream, choices, attach)
        former = before.scheduler if before is not None else attach.scheduler
        if former != attach.scheduler and stream.count_lost_schedulers(former, self._peers) >= MAX_LOST_SCHEDULERS:
            self.abort(stream, Internal("services stop whenever they run this request: change the request"))
            return _attached(stream, AttachState.ENDED)
        answer = _attached(stream, AttachState.ENDED if stream.finished else AttachState.OPEN)
        self._send(stream)
        if stream.finished:
            self._finish(stream)
        elif attach.step != NEW:
            self._catch_up(stream, attach)
        return answer

    def _catch_up(self, stream: Stream, attach: Attach) -> None:
        """Applies the steps that were read before the stream was attached, and that the scheduler did not know yet."""

        def take(outputs: list[StepOutput] | None) -> None:
            if stream.attachment is not attach or stream.state is not StreamState.OPEN:
                return
            stream.incomplete = False
            if outputs is None:
                self._ask_again(stream)
            for output in outputs or ():
                self.apply(output, stream)

        stream.incomplete = True
        self._steps.catch_up(attach.executor, attach.term, attach.step, take)

    def _ask_again(self, stream: Stream) -> None:
        """Asks the scheduler to attach the stream again, with the tokens that are missing here."""
        attach = stream.attachment
        if attach is None or stream.incomplete:
            return
        stream.incomplete = True
        _log.warning("tokens_lost", request_id=stream.request_id)
        self._notifier.ask_again(attach, len(stream.completions))

    def apply(self, output: StepOutput, only: Stream | None = None) -> None:
        """Appends the tokens of a step, sends their frames, and finishes the streams that have ended.

        With `only`, the step is applied to that stream alone.
        """
        now = time.monotonic()
        effects = self._sequences.apply(output, now, only)
        self._metrics.tokens += effects.tokens
        if only is None:  # a step that is applied later says nothing about latencies
            self._metrics.on_tokens(effects.before, now)
            for stream in effects.started:
                self._metrics.on_first_token(stream, now)
        for stream, sequences in effects.stopped.items():
            assert stream.attachment is not None
            self._notifier.abort(stream.attachment, sequences, AbortReason.STOP_STRING)
        for stream in effects.touched:
            self._sender.enqueue(stream)
        for stream in effects.ended:
            if stream.finished and stream.state is StreamState.OPEN:
                self._finish(stream)
        for stream, finish in effects.failed.items():
            self._metrics.not_finite += finish == Finish.NOT_FINITE
            self.abort(stream, _error_of(finish, stream.adapter))
        for stream in effects.gapped:
            self._ask_again(stream)
        self._sender.drain()

    def cancel(self, stream: Stream, *, abandoned: bool = False) -> bool:
        """Ends the completions of a stream where they are; returns False if the stream was over before.

        `abandoned`: whether no client is there to read it. A client that comes back sends its request again.
        """
        if stream.state is not StreamState.OPEN:
            return False
        stream.abandoned = abandoned
        self._abort_sequences(stream, AbortReason.CANCELLED)
        for choice in stream.choices:
            choice.cancel()
        self._finish(stream)
        return True

    def abort(self, stream: Stream, error: RequestError, reason: AbortReason = AbortReason.CANCELLED) -> None:
        """Ends a stream with an error, unless it was over before. The scheduler is told `reason`."""
        if stream.state is StreamState.OPEN:
            stream.error, stream.refused = error, not stream.accepted
            self._abort_sequences(stream, reason)
            self._finish(stream)

    def end_work(self, ack: str) -> None:
        """Ends a work item that belongs to no stream."""
        self._finalizer.end_work(ack)

    def close(self) -> None:
        """Forgets every open stream: another detokenizer adopts them."""
        for stream in list(self._registry.open):
            if stream.state is StreamState.OPEN:
                self.drop(stream)

    def on_scheduler_ended(self, _: str, scheduler: str) -> None:
        """Returns the work of a scheduler whose process has ended to the queue, for another one to take at once."""
        for stream in self._registry.open:
            if stream.state is StreamState.OPEN and stream.attachment and stream.attachment.scheduler == scheduler:
                self._finalizer.return_work(stream.attachment.ack)

    def resume(self, stream: Stream, reply: str, encoding: int, start: int) -> None:
        """Sends the frames from position `start` on, to a known or a new subscriber."""
        subscriber = stream.find_subscriber(reply)
        if subscriber is not None and subscriber.streaming:
            subscriber.rewind(start)
            self._send(stream)
        else:
            self._add(Subscriber(stream, reply, encoding, streaming=True, start=start))

    def keep_alive(self) -> None:
        """Tells the subscribers of streams without a token that their requests still wait."""
        for stream in self._registry.open:
            if stream.state is StreamState.OPEN and stream.accepted and not stream.tokens:
                self._sender.keep_alive(stream)

    def _join(self, stream: Stream, request: OpenStream) -> OpenState:
        """Adds a subscriber to a stream that exists; an inbox that has subscribed before gets all frames again."""
        if stream.digest != request.digest:
            return OpenState.CONFLICT
        subscriber = stream.find_subscriber(request.reply)
        if subscriber is not None:
            subscriber.rewind(0, self._accepted(stream, request))
            self._send(stream)
        else:
            self._subscribe(stream, request)
        # The same inbox asks again, and the request is in no queue yet: the tokenizer may have missed the answer to its
        # first attempt, and not stored the work.
        return OpenState.ATTACHED if subscriber is None or stream.accepted else OpenState.WAITING

    def _add_stream(self, request: OpenStream, vocabulary: Vocabulary, headers: Headers, timeout: float) -> Stream:
        stream = Stream(
            request_id=request.request_id,
            digest=request.digest,
            completions=open_choices(vocabulary, request),
            prompt_tokens=sum(unpack(request.prompt_lengths)),
            span=tracing.begin("stream", headers),
            secret=request.secret,
            prompts=request.prompts if request.prompt_logprobs or request.return_token_ids else (),
            chat_format=request.chat_format,
            best=request.best,
            adapter=request.adapter,
            num_prompts=len(request.prompts),
            hides_logprobs=request.hides_logprobs,
            times=Times(time.time() - max(0.0, request.timeout_ms / 1000 - timeout)),
        )
        loop = asyncio.get_running_loop()
        late = DeadlineExceeded("timeout_ms has passed: allow more time or ask for fewer tokens")
        stream.deadline = loop.call_later(timeout, self.abort, stream, late, AbortReason.DEADLINE)
        self._registry.add(stream)
        return stream

    def _subscribe(self, stream: Stream, request: OpenStream, sent: Sequence[int] = ()) -> None:
        self._add(
            Subscriber(
                stream,
                request.reply,
                request.encoding,
                streaming=request.stream,
                sent=sent,
                accepted=self._accepted(stream, request) if request.stream else None,
                batch_inbox=request.batch_inbox,
            )
        )

    def _add(self, subscriber: Subscriber) -> None:
        stream = subscriber.stream
        if len(stream.subscribers) >= MAX_SUBSCRIBERS:
            stream.unsubscribe(stream.subscribers[0])
        stream.subscribers.append(subscriber)
        stream.delivered.clear()
        self._send(stream)

    def note_stored(self, stream: Stream, number: int) -> None:
        """Tells the client that its request is accepted. Before that it hears nothing, and sends the request again.

        `number`: that of the work item, as the store has returned it; 0: unknown.
        """
        stream.number = number or stream.number
        if not stream.accepted:
            stream.stored = True
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        """Sends the frames that are due, unless the client may not know of the stream yet."""
        if stream.accepted:
            self._sender.enqueue(stream)
            self._sender.drain()

    def _accepted(self, stream: Stream, request: OpenStream) -> Accepted:
        """Returns the first frame of a stream. Only clients learn from it the subjects that cancel and resume it."""
        cancel, resume = (
            subjects.for_tenant(f"{verb}.{self._instance}.{stream.public_id}.{stream.secret.hex()}", stream.tenant)
            for verb in (subjects.CANCEL, subjects.RESUME)
        )
        ids = [unpack(prompt) for prompt in stream.prompts] if request.return_token_ids else UNSET
        return Accepted(stream.public_id, cancel, resume, stream.prompt_tokens, stream.chat_format, ids)

    def _accept_known(
        self, choice: StreamedChoice, tokens: list[int], finish: int, reported: Sequence[ReportedLogprobs]
    ) -> None:
        """Appends the `tokens` that only the scheduler knows, as if they had just been generated.

        If the request asks for log-probabilities, tokens without them are dropped, and the scheduler has them generated
        again. For a beam search they are `reported`.
        """
        for position, logprobs in enumerate(reported, choice.prompt_length):
            choice.report(position, logprobs)
        if (choice.logprobs is not None and not reported) or choice.prompt_logprobs:
            return
        last = len(tokens) - 1
        if len(choice.tokens) < len(tokens):
            choice.origins = None
        for position in range(len(choice.tokens), len(tokens)):
            self._metrics.tokens += choice.accept(
                position, tokens[position], finish if position == last else Finish.NONE
            )

    def _abort_sequences(self, stream: Stream, reason: AbortReason) -> None:
        """Has the scheduler abort the sequences of a stream that have not ended."""
        attach = stream.attachment
        if attach is not None:
            completions = enumerate(stream.completions, attach.first_sequence)
            live = [sequence for sequence, completion in completions if completion.finish is None]
            if live:
                self._notifier.abort(attach, live, reason)

    def _finish(self, stream: Stream) -> None:
        """Hands an open stream to the finalizer: its sequences are unbound, so that no row changes it any more."""
        if stream.attachment is not None:
            self._sequences.unbind(stream, stream.attachment)
        self._finalizer.start(stream)


def _attached(stream: Stream, state: AttachState) -> Attached:
    ended = [index for index, completion in enumerate(stream.completions) if completion.finish is not None]
    return Attached(state, tuple(pack(completion.tokens) for completion in stream.completions), pack(ended))


def _error_of(finish: int, adapter: str) -> RequestError:
    """Returns the error of a request for `adapter` that has one of `step.ERRORS`."""
    if finish == Finish.ADAPTER_LOST:
        return Unavailable(f"adapter {adapter} cannot be loaded: send the request again, or load the adapter again")
    return InvalidRequest(GRAMMAR_LIMIT) if finish == Finish.GRAMMAR_LIMIT else Internal(NOT_FINITE)
