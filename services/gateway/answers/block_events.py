"""A stream whose answer is a sequence of blocks: each one begins, grows and ends, then the next one."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from typing_extensions import override

from pagewire.services.gateway.answers.answer_reader import AnswerBlock, AnswerReader
from pagewire.services.gateway.answers.sse import EventStream
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import Delta, Final, FinalChoice


class BlockEvents(EventStream):
    """Cuts the only choice of a request into blocks; a subclass encodes them."""

    done: ClassVar[bytes] = b""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._block: AnswerBlock | None = None
        """The block that grows."""

    @abstractmethod
    def begin_block(self, block: AnswerBlock) -> bytes:
        """Returns the events of a block that begins."""

    @abstractmethod
    def grow_block(self, block: AnswerBlock, text: str) -> bytes:
        """Returns the event of a block that has grown by a text."""

    @abstractmethod
    def end_block(self, block: AnswerBlock, *, cut: bool) -> bytes:
        """Returns the events of a block that has ended; `cut`: the limit of tokens has ended it."""

    @abstractmethod
    def finish(self, choice: FinalChoice, final: Final) -> bytes:
        """Returns the events after all blocks of the only choice."""

    @override
    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        return b"".join(event for delta in batch for event in self._events(self._reader.push(delta.index, delta.text)))

    @override
    def ends(self, final: Final, *, usage: bool) -> bytes:
        (choice,) = final.choices
        events = [*self._events(self._reader.end(choice))]
        if self._block is None:
            events += self._events([Part(Kind.CONTENT, "")])
        cut = choice.finish_reason == "length"
        return b"".join([*events, *self._end(cut=cut), self.finish(choice, final)])

    def _events(self, parts: Iterable[Part]) -> Iterable[bytes]:
        for part in parts:
            block = self._block
            if block is None or not block.takes(part):
                yield from self._end()
                block = self._block = self._reader.block(0, part)
                yield self.begin_block(block)
            if part.kind is not Kind.NAME and part.text:
                block.texts.append(part.text)
                yield self.grow_block(block, part.text)

    def _end(self, *, cut: bool = False) -> Iterable[bytes]:
        if self._block is not None:
            yield self.end_block(self._block, cut=cut)
