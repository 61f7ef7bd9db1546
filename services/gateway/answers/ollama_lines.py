"""A streamed answer of Ollama's routes: a line of JSON per part of the message, and a last one with the figures."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from typing_extensions import override

from pagewire.services.gateway.answers.answer_reader import AnswerBlock, AnswerReader
from pagewire.services.gateway.answers.block_events import BlockEvents
from pagewire.services.gateway.answers.logprobs import chat_logprobs
from pagewire.services.gateway.answers.ollama_shapes import CalledFunction, MadeCall, OllamaAnswer, OllamaMessage
from pagewire.services.gateway.answers.openai_shapes import ChatTokenLogprob
from pagewire.services.gateway.http import errors
from pagewire.shared.chat.parts import Kind
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Choice, Delta, Final, FinalChoice

MEDIA_TYPE = "application/x-ndjson"
_encode = msgspec.json.Encoder().encode


class OllamaLines(BlockEvents):
    """The lines of one answer. A call is a line once all its arguments are there."""

    media_type: ClassVar[bytes] = MEDIA_TYPE.encode()

    def __init__(
        self, reader: AnswerReader, shape: type[OllamaAnswer], model: str, top_logprobs: int = 0, *, loads: bool = False
    ) -> None:
        """Begins a stream.

        Args:
            reader: reads the text as parts.
            shape: struct of a line.
            model: name of the model.
            top_logprobs: number of the likeliest tokens that are shown with each token.
            loads: whether the answer is that the model is loaded, and has no text.
        """
        super().__init__(reader)
        self._shape = shape
        self._model = model
        self._top_logprobs = top_logprobs
        self._loads = loads
        self._calls = 0
        self._logprobs: list[ChatTokenLogprob] = []
        """Log-probabilities of the tokens whose text is in no line yet."""

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        return b""

    @override
    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        if self._loads:
            return b""
        lines = []
        for delta in batch:
            if delta.logprobs:
                self._logprobs += chat_logprobs(delta.logprobs, self._top_logprobs).content
            lines.append(super().texts([delta]))
        return b"".join(lines)

    @override
    def begin_block(self, block: AnswerBlock) -> bytes:
        return b""

    @override
    def grow_block(self, block: AnswerBlock, text: str) -> bytes:
        match block.kind:
            case Kind.CONTENT:
                return self._line(OllamaMessage(content=text))
            case Kind.REASONING:
                return self._line(OllamaMessage(thinking=text))
        return b""

    @override
    def end_block(self, block: AnswerBlock, *, cut: bool) -> bytes:
        if block.kind is not Kind.NAME or (call := call_of(block, self._calls)) is None:
            return b""
        self._calls += 1
        return self._line(OllamaMessage(tool_calls=[call]))

    @override
    def finish(self, choice: FinalChoice, final: Final) -> bytes:
        line = self._shape.of(self._model, OllamaMessage())
        line.logprobs = self._logprobs or msgspec.UNSET
        if self._loads:
            line.end_load()
        else:
            line.end(choice, final.usage, final.metrics)
        return _encode(line) + b"\n"

    @override
    def failed(self, error: PagewireError) -> bytes:
        return errors.body_of(error, errors.OLLAMA)[1] + b"\n"

    def _line(self, message: OllamaMessage) -> bytes:
        line = self._shape.of(self._model, message)
        if self._logprobs:
            line.logprobs, self._logprobs = self._logprobs, []
        return _encode(line) + b"\n"


def message_of(choice: Choice, reader: AnswerReader) -> OllamaMessage:
    """Returns the message of a whole choice."""
    message, calls = OllamaMessage(), list[MadeCall]()
    for block in reader.blocks(choice):
        match block.kind:
            case Kind.CONTENT:
                message.content += block.text
            case Kind.REASONING:
                message.thinking = (message.thinking or "") + block.text
            case _:
                if (call := call_of(block, len(calls))) is not None:
                    calls.append(call)
    message.tool_calls = calls or msgspec.UNSET
    return message


def call_of(block: AnswerBlock, index: int) -> MadeCall | None:
    """Returns the call of a block; None: its arguments are no object, since the model was cut or has written others."""
    if (arguments := block.arguments) is None:
        return None
    return MadeCall(block.call_id, CalledFunction(index, block.name, arguments))
