"""Sends messages to the model and writes the answers as they arrive: as Markdown in a terminal, else as plain text."""

import sys
from contextlib import aclosing
from typing import Protocol, Self

from rich.console import Console
from typing_extensions import override

from pagewire.client.async_client import AsyncClient
from pagewire.commands import session
from pagewire.commands.chat.conversation import Conversation
from pagewire.commands.chat.markdown import MarkdownWriter
from pagewire.commands.timings import Timings
from pagewire.shared.settings.config import Settings

ANSWER_WITHIN = 3600.0
"""Timeout of an answer, in seconds: long, because the user can stop an answer."""


class Writer(Protocol):
    """Writes an answer: `with writer: writer.write(part)`."""

    def __enter__(self) -> Self:
        """Begins the answer."""

    def __exit__(self, *_: object) -> None:
        """Ends the answer, even if it was interrupted."""

    def write(self, text: str) -> None:
        """Adds a part of the answer."""


class PlainWriter(Writer):
    """Writes an answer as plain text, followed by a line end."""

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self.write("\n")

    @override
    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def writer_to(console: Console) -> Writer:
    """Returns the writer for answers on standard output."""
    return MarkdownWriter(console) if console.is_terminal and not console.is_dumb_terminal else PlainWriter()


async def answer(client: AsyncClient, conversation: Conversation, text: str, writer: Writer) -> Timings:
    """Sends a message and writes the answer as it arrives. An interrupted answer stays in the conversation.

    Raises:
        RequestError: the message was refused, or the pipeline failed.
        BusUnavailable: there is no connection.
    """
    parts: list[str] = []
    try:
        stream = client.stream_chat(conversation.ask(text), timeout=ANSWER_WITHIN, **conversation.sampling)
        timings = Timings()
        async with aclosing(aiter(stream)) as deltas:
            delta = await anext(deltas, None)  # an error before the first token prints no answer
            with writer:
                while delta is not None:
                    timings.count(len(delta.token_ids))
                    parts.append(delta.text)
                    writer.write(delta.text)
                    delta = await anext(deltas, None)
    finally:
        conversation.answer("".join(parts))
    return timings


async def answer_once(conversation: Conversation, text: str, settings: Settings) -> int:
    """Answers one message on standard output; returns the exit code.

    Raises:
        PagewireError: the message cannot be answered.
    """
    async with session.connect(settings) as client:
        await answer(client, conversation, text, writer_to(Console(highlight=False)))
    return 0
