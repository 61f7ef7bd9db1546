"""The interactive chat: a line editor with a history, and answers that can be stopped."""

import asyncio
import os
import signal
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import NestedCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from rich.console import Console

from pagewire.client.async_client import AsyncClient
from pagewire.commands import session
from pagewire.commands.chat.answers import answer, writer_to
from pagewire.commands.chat.commands import COMMANDS, Ask, Exit, Save, Show, interpret, is_open
from pagewire.commands.chat.conversation import PARAMETERS, Conversation
from pagewire.commands.timings import Timings
from pagewire.shared.errors import ConfigurationError, PagewireError
from pagewire.shared.settings.config import Settings

LEAVE = "Ctrl-D or /exit leaves"


async def talk(conversation: Conversation, settings: Settings) -> int:
    """Runs the chat until the user leaves; returns the exit code.

    Raises:
        PagewireError: there is no stack, or it cannot be started.
    """
    async with session.connect(settings) as client:
        await Terminal(client, conversation).run()
    return 0


class Terminal:
    """A chat in the terminal."""

    def __init__(self, client: AsyncClient, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation
        self._console = Console(highlight=False)
        self._notes = Console(highlight=False, stderr=not self._console.is_terminal)
        self._answering: asyncio.Task[Timings] | None = None
        self._editor = _line_editor()

    async def run(self) -> None:
        """Reads input and shows answers until the user leaves. Ctrl-C stops an answer, but not the chat."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop_answer)
        models = ", ".join(model.name for model in await self._client.models())
        self._note(f"{models}. /help lists the commands, {LEAVE}.")
        while True:
            try:
                entered = await self._editor.prompt_async(HTML("<b>&gt; </b>"), handle_sigint=False)
            except KeyboardInterrupt:
                self._note(LEAVE)
                continue
            except EOFError:
                return
            if entered.strip() and not await self._react(entered):
                return

    async def _react(self, entered: str) -> bool:
        """Runs the user's input; returns whether the chat continues."""
        try:
            match interpret(self._conversation, entered):
                case Ask(text):
                    await self._ask(text)
                case Show(text):
                    self._note(text)
                case Save(file, text):
                    _save(file, text)
                    self._note(f"written to {file}")
                case Exit():
                    return False
        except PagewireError as error:
            self._note(str(error), style="red")
        return True

    async def _ask(self, text: str) -> None:
        writer = writer_to(self._console)
        self._answering = asyncio.create_task(answer(self._client, self._conversation, text, writer))
        await asyncio.wait({self._answering})
        task, self._answering = self._answering, None
        self._note("stopped" if task.cancelled() else _remark(task.result(), self._conversation))

    def _stop_answer(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False)


def _remark(timings: Timings, conversation: Conversation) -> str:
    """Returns the line below an answer."""
    limit: int | None = conversation.sampling.get("max_tokens")
    if limit is None or timings.tokens < limit:
        return str(timings)
    return f"{timings}; cut at max_tokens: /set max_tokens {2 * limit} allows more"


def _save(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from error


def _line_editor() -> "PromptSession[str]":
    """Returns the line editor. Enter sends the message unless its quotes are open; Alt-Enter never sends it."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.newline(copy_margin=False)
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    words = {f"/{name}": dict.fromkeys(PARAMETERS) if name == "set" else None for name in COMMANDS}
    return PromptSession(
        history=_history(),
        completer=NestedCompleter.from_nested_dict(words),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        output=create_output(always_prefer_tty=True),
    )


def _history() -> History:
    """Returns the history of earlier chats, in a file that only its owner can read, or else in memory."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pagewire"
    file = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
