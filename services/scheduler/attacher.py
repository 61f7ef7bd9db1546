"""Tells detokenizers which sequences their requests are, and finds those a new one whose detokenizer is gone."""

import time
from collections.abc import Callable

import msgspec
import structlog

from pagewire.services.scheduler.detokenizers import Detokenizers
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.request import Request
from pagewire.shared import subjects
from pagewire.shared.errors import BusError, NoResponders, WireVersionError
from pagewire.shared.messages import Decoder, encode, pack
from pagewire.shared.messages.attach import NEW, Attach, Attached, AttachState
from pagewire.shared.process.context import Context

ATTACH_TIMEOUT = 1.0
"""Seconds that a detokenizer has to answer."""
LOOK_EVERY = 0.25
"""Seconds between two looks whether detokenizers are gone, if no heartbeat says so before."""

_log = structlog.get_logger()
_attached = Decoder(Attached)


class Attacher:
    """Sends `Attach` messages."""

    def __init__(self, context: Context, detokenizers: Detokenizers) -> None:
        self._context = context
        self._detokenizers = detokenizers
        self._policy: Policy | None = None
        self._last_term = 0
        self._executor = ""

    def start_term(self, policy: Policy, executor: str) -> None:
        """Begins a term."""
        self._policy, self._executor, self._last_term = policy, executor, policy.term

    def end_term(self) -> None:
        """Ends the term: nobody is told of its sequences any more."""
        self._policy = None

    async def attach(
        self, request: Request, first_sequence: int, held: Callable[[], bool], *, running: bool = False
    ) -> Attached | None:
        """Tells the detokenizer the sequences of a request; returns its answer.

        `held` tells whether the scheduler still has the request; `running` says that the sequences are not new.

        If the detokenizer is gone or drains, its successor adopts the stream; while there is none, this waits for one.
        Returns None when the term has ended or the request is not held any more, or when its detokenizer cannot be
        reached and its stream not be adopted.
        """
        policy = self._policy
        request.attaching += 1
        try:
            while self._policy is policy and held():
                instance = self._detokenizers.choose(request)
                if not instance:
                    await self._detokenizers.wait(LOOK_EVERY)
                    continue
                if instance != request.detokenizer:
                    request.sent = self._sent(request) or request.sent
                    request.detokenizer, request.must_open = instance, True
                    request.moves += 1
                answer = await self._ask(request, first_sequence, running=running)
                if answer is None:
                    if not request.work.opening:
                        return None
                    await self._detokenizers.wait(LOOK_EVERY)
                elif answer.state == AttachState.UNKNOWN and request.work.opening and not request.must_open:
                    request.must_open = True
                    request.moves += 1
                else:
                    if answer.state == AttachState.OPEN:
                        request.must_open, request.attached_at = False, (self._last_term, time.monotonic())
                    return answer
            return None
        finally:
            request.attaching -= 1

    def _sent(self, request: Request) -> tuple[int, ...]:
        """Returns how many tokens per choice the detokenizer has certainly sent; empty if that is not known.

        After the last step whose frames were sent, each step has brought `Policy.max_row_tokens` at most per sequence.
        """
        policy = self._policy
        term, since = request.attached_at
        if policy is None or not request.sequences or term != policy.term:
            return ()
        step = self._detokenizers.steps_sent(request.detokenizer, term, since)
        if step is None:
            return ()
        behind = max(0, policy.step - step) * policy.max_row_tokens
        return tuple(max(0, len(s.tokens) - s.num_prompt_tokens - behind) for s in request.sequences)

    async def _ask(self, request: Request, first_sequence: int, *, running: bool) -> Attached | None:
        """Sends one `Attach`; returns the answer, None if there is none."""
        policy, opens = self._policy, request.must_open
        message = Attach(
            request_id=request.work.request_id,
            term=policy.term if policy else self._last_term,
            generation=request.generation,
            scheduler=self._context.instance,
            executor=self._executor,
            ack=request.ack,
            first_sequence=first_sequence,
            tokens=request.generated(),
            finishes=bytes(sequence.finish for sequence in request.sequences),
            step=policy.step if policy and running else NEW,
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
