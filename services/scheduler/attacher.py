"""Tells detokenizers the sequences of their requests, and moves requests whose detokenizer is gone to another one."""

import time
from collections.abc import Callable

import msgspec
import structlog

from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.term import Term
from pagewire.shared import subjects
from pagewire.shared.errors import BusError, NoResponders, RequestError, WireVersionError
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.attach import NEW, Attach, Attached, AttachState
from pagewire.shared.messages.open import AbortStream
from pagewire.shared.process.context import Context

ATTACH_TIMEOUT = 1.0
"""Seconds that a detokenizer has to answer."""
LOOK_EVERY = 0.25
"""Seconds between two checks whether detokenizers are gone, if no heartbeat says so before."""

_log = structlog.get_logger()
_attached = Decoder(Attached)


class Attacher:
    """Attaches requests to their detokenizers, and refuses those that cannot run."""

    def __init__(self, context: Context, detokenizers: Detokenizers) -> None:
        self._context = context
        self._detokenizers = detokenizers

    async def attach(
        self, request: Request, first_sequence: int, term: Term, held: Callable[[], bool], *, running: bool = False
    ) -> Attached | None:
        """Tells the detokenizer the sequences of a request; returns its answer.

        If the detokenizer is gone or drains, its successor adopts the stream; while there is none, this waits for one.
        Returns None when the request is not `held` any more, or a term has begun or ended since, and when its
        detokenizer cannot be reached and its stream not be adopted. `term` is the present term or the last one;
        `running`: the sequences are not new.
        """
        if not request.attaching:
            request.attach_again = False
        request.attaching += 1
        try:
            while held():
                instance = self._detokenizers.choose(request)
                if not instance:
                    await self._detokenizers.wait(LOOK_EVERY)
                    continue
                if instance != request.detokenizer:
                    request.sent = self._sent(request, term) or request.sent
                    request.detokenizer, request.must_open = instance, True
                    request.moves += 1
                answer = await self._ask(request, first_sequence, term, running=running)
                if answer is None:
                    if not request.work.opening:
                        return None
                    await self._detokenizers.wait(LOOK_EVERY)
                elif answer.state == AttachState.UNKNOWN and request.work.opening and not request.must_open:
                    request.must_open = True
                    request.moves += 1
                else:
                    if answer.state == AttachState.OPEN:
                        request.must_open, request.attached_at = False, (term.number, time.monotonic())
                    return answer
            return None
        finally:
            request.attaching -= 1

    async def refuse(self, request: Request, error: RequestError) -> bool:
        """Has the detokenizer end a request that cannot run; returns whether it has answered."""
        abort = encode(AbortStream(request.work.request_id, error.kind, error.message))
        subject = f"{subjects.DETOKENIZER}.{request.detokenizer}.abort"
        try:
            await self._context.bus.request(subject, abort, timeout=ATTACH_TIMEOUT)
        except BusError as unheard:
            _log.warning("detokenizer_unreachable", request_id=request.work.request_id, reason=str(unheard))
            return False
        return True

    def _sent(self, request: Request, term: Term) -> tuple[int, ...]:
        """Returns how many tokens per choice the detokenizer has certainly sent; empty if that is not known.

        After the last step whose frames were sent, each step has brought `Policy.max_row_tokens` at most per sequence.
        """
        attached_in, since = request.attached_at
        if term.ended or not request.sequences or attached_in != term.number:
            return ()
        step = self._detokenizers.steps_sent(request.detokenizer, term.number, since)
        if step is None:
            return ()
        behind = max(0, term.policy.step - step) * term.policy.max_row_tokens
        return tuple(max(0, len(s.tokens) - s.num_prompt_tokens - behind) for s in request.sequences)

    async def _ask(self, request: Request, first_sequence: int, term: Term, *, running: bool) -> Attached | None:
        """Sends one `Attach`; returns the answer, None if there is none."""
        opens = request.must_open
        message = Attach(
            request_id=request.work.request_id,
            term=term.number,
            generation=request.generation,
            scheduler=self._context.instance,
            executor=term.executor.name,
            ack=request.ack,
            first_sequence=first_sequence,
            tokens=request.generated(),
            finishes=bytes(sequence.finish for sequence in request.sequences),
            step=term.policy.step if running and not term.ended else NEW,
            move=request.moves,
            opening=request.work.opening if opens else b"",
            sent=pack(request.sent) if opens else b"",
            **request.scores(),
        )
        subject = f"{subjects.DETOKENIZER}.{request.detokenizer}.attach"
        headers = {"traceparent": request.trace} if opens and request.trace else None
        try:
            reply = await self._context.bus.request(subject, encode(message), timeout=ATTACH_TIMEOUT, headers=headers)
            return _attached.decode(reply.data)
        except NoResponders as error:
            self._detokenizers.note_absent(request.detokenizer)
            reason = str(error)
        except (BusError, WireVersionError, msgspec.DecodeError) as error:
            reason = str(error)
        _log.warning("detokenizer_unreachable", request_id=request.work.request_id, reason=reason)
        return None
