"""A stand-in for tokenizer and detokenizer: answers requests with frames that a test chooses."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Self

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import RequestError
from pagewire.shared.messages.client import (
    Accepted,
    CancelReply,
    ChatFormat,
    Choice,
    Delta,
    Final,
    FinalChoice,
    Frame,
    GenerateRequest,
    ModelInfo,
    ModelList,
    Result,
    ResumeRequest,
    Usage,
)
from pagewire.shared.messages.client_headers import LEAVES, REFUSED
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.tokenize import TokenizeReply, TokenizeRequest

MODEL = "tiny"
WORDS = ("once ", "upon ", "a ", "", "time")


def deltas(index: int = 0, words: Iterable[str] = WORDS) -> list[Delta]:
    return [Delta(index, start, text, [100 + start]) for start, text in enumerate(words)]


def final(request_id: str, frames: Iterable[Frame], reason: str = "length") -> Final:
    parts = [frame for frame in frames if isinstance(frame, Delta)]
    choices = [FinalChoice(index, reason) for index in sorted({part.index for part in parts})]  # type: ignore[arg-type]
    return Final(request_id, choices, Usage(3, len(parts)))


class Responder:
    """Serves one model on a bus. Set `script` to decide what a request is answered with at once.

    Attributes:
        requests, tokenizations, resumes, cancels, leavings: what was asked, in order.
        tenants: who sent each request.
        script: frames that follow `accepted`; by default the words, the final frame and the empty message.
        full: what `resume` repeats from.
        chat_format: what `accepted` says of the texts.
        refusal: what every request is refused with; None: requests are answered.
        models: models and adapters that are served, by other tokenizers but for the first one.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.requests: list[GenerateRequest] = []
        self.tokenizations: list[TokenizeRequest] = []
        self.headers: list[dict[str, str]] = []
        self.resumes: list[int] = []
        self.cancels: list[str] = []
        self.leavings: list[str] = []
        self.tenants: list[str] = []
        self.reply = ""
        self.script: Callable[[GenerateRequest], list[Frame | RequestError | None]] = self.answer
        self.full: list[Frame | RequestError | None] = []
        self.chat_format: ChatFormat | None = None
        self.refusal: RequestError | None = None
        self.models = [ModelInfo(MODEL, f"{subjects.GENERATE}.{MODEL}", 64, "r1")]

    async def start(self) -> Self:
        handlers = {
            f"{subjects.GENERATE}.{MODEL}": self._generate,
            f"{subjects.TOKENIZE}.{MODEL}": self._tokenize,
            subjects.MODELS: self._models,
            f"{subjects.RESUME}.*": self._resume,
            f"{subjects.CANCEL}.*": self._cancel,
        }
        self._subscriptions = [
            await self.bus.subscribe(pattern, handler)
            for subject, handler in handlers.items()
            for pattern in subjects.for_everyone(subject)
        ]
        return self

    async def leave(self) -> None:
        """Nobody listens any more, until it is started again."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def answer(self, request: GenerateRequest) -> list[Frame | RequestError | None]:
        """The whole answer, None standing for the empty message."""
        request_id = request.request_id or ""
        if not request.stream:
            text = "".join(WORDS)
            choices = [Choice(i, text, [100, 101], "length") for i in range(request.sampling.n)]
            return [Result(request_id, choices, Usage(3, 2 * request.sampling.n))]
        parts = [delta for index in range(request.sampling.n) for delta in deltas(index)]
        return [*parts, final(request_id, parts), None]

    def send(self, *frames: Frame | RequestError | None, refused: bool = False) -> None:
        """Sends to the last requester. `refused`: whether errors answer the last message alone."""
        for frame in frames:
            if frame is None:
                self.bus.publish(self.reply, b"")
            elif isinstance(frame, RequestError):
                body = encode_frame(error_frame(frame, self.requests[-1].request_id or ""), Encoding.MSGPACK)
                headers = error_headers(frame) | ({REFUSED: "1"} if refused else {})
                self.bus.publish(self.reply, body, headers=headers)
            else:
                self.bus.publish(self.reply, encode_frame(frame, Encoding.MSGPACK))

    def _generate(self, message: Message) -> None:
        request = msgspec.msgpack.decode(message.data, type=GenerateRequest)
        assert message.headers["Content-Type"] == "application/msgpack"
        self.requests.append(request)
        self.tenants.append(subjects.tenant_of(message.subject))
        self.headers.append(dict(message.headers))
        self.reply = message.reply
        request_id = request.request_id or ""
        if self.refusal is not None:
            self.send(self.refusal, None, refused=True)
            return
        if request.stream:
            tenant = self.tenants[-1]
            cancel, resume = (
                subjects.for_tenant(f"{verb}.{request_id}", tenant) for verb in (subjects.CANCEL, subjects.RESUME)
            )
            self.send(Accepted(request_id, cancel, resume, prompt_tokens=3, chat_format=self.chat_format))
        self.send(*self.script(request))

    def _tokenize(self, message: Message) -> None:
        self.tokenizations.append(msgspec.json.decode(message.data, type=TokenizeRequest))
        self.bus.publish(message.reply, msgspec.json.encode(TokenizeReply([100, 101, 102])))

    def _resume(self, message: Message) -> None:
        start = msgspec.msgpack.decode(message.data, type=ResumeRequest).start
        self.resumes.append(start)
        self.reply = message.reply
        missing = (frame for frame in self.full if not isinstance(frame, Delta) or frame.start >= start)
        self.send(*missing, refused=True)

    def _cancel(self, message: Message) -> None:
        leaves = message.headers.get(LEAVES)
        (self.cancels if leaves is None else self.leavings).append(message.subject.rpartition(".")[2])
        assert leaves in {None, self.reply}
        if message.reply:
            self.bus.publish(message.reply, msgspec.json.encode(CancelReply("cancelled")))

    def _models(self, message: Message) -> None:
        self.bus.publish(message.reply, msgspec.json.encode(ModelList(self.models)))


async def settle() -> None:
    """Lets everything that the memory bus holds be delivered."""
    for _ in range(20):
        await asyncio.sleep(0)
