"""One request as its client sees it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span

from pagewire.services.detokenizer.completion import Completion
from pagewire.shared.errors import REQUEST_ERRORS, Internal, RequestError
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.done import Done, DoneChoice

if TYPE_CHECKING:
    from pagewire.services.detokenizer.mailbox import Mailbox


class StreamState(Enum):
    """Where a request stands."""

    OPEN = auto()
    """It waits or runs."""
    ENDING = auto()
    """It is over, and its record is being stored: nobody is told yet."""
    ENDED = auto()
    """Its last frame may be sent."""


@dataclass(slots=True, eq=False)
class Stream:
    """The completions of a request, its readers, and how it ended."""

    request_id: str
    digest: bytes
    """Fingerprint of the request's body."""
    completions: Sequence[Completion]
    """`Choice`s, unless it was restored from its record."""
    prompt_tokens: int
    cached_tokens: int = 0
    state: StreamState = StreamState.OPEN
    error: RequestError | None = None
    """What ended it instead of its completions."""
    mailboxes: "list[Mailbox]" = field(default_factory=list)
    """Its readers that have not got everything yet."""
    attachment: Attach | None = None
    """Which sequences it is, once a scheduler has admitted it."""
    deadline: asyncio.TimerHandle | None = None
    delivered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the last reader has got everything."""
    span: Span = INVALID_SPAN

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish is not None for completion in self.completions)

    def reader(self, reply: str) -> "Mailbox | None":
        """The reader with that inbox."""
        return next((mailbox for mailbox in self.mailboxes if mailbox.reply == reply), None)

    def drop(self, mailbox: "Mailbox") -> None:
        """The reader has got everything, or gets no more."""
        mailbox.closed = True
        if mailbox in self.mailboxes:
            self.mailboxes.remove(mailbox)
        if not self.mailboxes:
            self.delivered.set()

    def record(self) -> Done:
        """What is kept of it when it is over."""
        choices = () if self.error is not None else tuple(map(_record, self.completions))
        return Done(
            request_id=self.request_id,
            digest=self.digest,
            choices=choices,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            error=self.error.kind if self.error is not None else "",
            message=self.error.message if self.error is not None else "",
        )


def restore(done: Done) -> Stream:
    """The ended stream that a record tells of."""
    return Stream(
        request_id=done.request_id,
        digest=done.digest,
        completions=[
            Completion(unpack(choice.tokens), list(choice.texts), choice.finish_reason, choice.stop_reason)
            for choice in done.choices
        ],
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        state=StreamState.ENDED,
        error=REQUEST_ERRORS.get(done.error, Internal)(done.message) if done.error else None,
    )


def _record(completion: Completion) -> DoneChoice:
    return DoneChoice(
        tokens=pack(completion.tokens),
        texts=tuple(completion.texts),
        finish_reason=completion.finish or "cancelled",
        stop_reason=completion.stop_reason,
    )
