"""The process in which chat templates run: `python -m pagewire.services.tokenizer.chat.worker PARENT`.

A template is untrusted code of the model's publisher. This process has limited memory, half a second of CPU time and no
secrets in its environment; a template that exceeds a limit only ends this process. The parent sends a message and waits
for the answer before the next one. Messages are MessagePack after four bytes of length, on standard input and output.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from jinja2 import TemplateError

from pagewire.services.tokenizer.chat.chat_template import ChatTemplate, Conversation
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.shared.process.linux_process import die_with

CPU_SECONDS = 0.5
"""CPU seconds for one conversation, for one probe of a template, and for the compilation of all templates."""
MEMORY = 256 * 1024 * 1024
"""Maximum address space in bytes; the interpreter and Jinja take 30 MB."""
MAX_TEXT = 32 * 1024 * 1024
"""Maximum size of an answer in bytes; the ids of a longer text would not fit into a message of the broker."""
TOO_MUCH_MEMORY = 70
"""Exit code if the template exceeded the memory limit."""
MAX_REASON = 500
"""Maximum characters of a refusal."""
LENGTH_BYTES = 4
"""Bytes of the length before each message."""
T = TypeVar("T")


class Load(msgspec.Struct):
    """The first message to a worker: the templates to compile."""

    templates: dict[str, str]
    """Sources by name."""
    special: dict[str, str]
    """Special tokens by name."""
    rules: dict[str, MessageRules]
    """Rules of the templates that have been probed, by name."""


class Probe(msgspec.Struct, tag=True):
    """A later message to a worker: the name of a template whose rules are to be found."""

    template: str


class Job(msgspec.Struct, tag=True):
    """Any other message to a worker: a conversation, and the name of its template."""

    template: str
    conversation: Conversation


class Answer(msgspec.Struct):
    """The answer to each message."""

    text: str = ""
    refusal: str = ""
    """Reason why there is no text; empty: `text` is valid."""
    refused: int | None = None
    """Index of the message that is refused; None: it is not known."""
    rules: MessageRules | None = None
    """Rules of a template, the answer to `Probe`."""


def frame(message: msgspec.Struct) -> bytes:
    """Returns the encoded bytes of a message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def main(parent: int) -> None:
    """Answers messages until standard input is closed."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    load = _receive(Load)
    if load is None:
        return
    compiled: dict[str, ChatTemplate] = {}

    def compile_all(load: Load) -> Answer:
        environment = chat_environment()
        for name, source in load.templates.items():
            compiled[name] = ChatTemplate(environment, source, load.special)
            compiled[name].rules = load.rules.get(name, MessageRules())
        return Answer()

    def work(message: Probe | Job) -> Answer:
        template = compiled[message.template]
        if isinstance(message, Probe):
            template.rules = template.probe()
            return Answer(rules=template.rules)
        try:
            return Answer(template.render(message.conversation))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # templates may raise any exception
            return Answer(refusal=_reason(error), refused=template.refused_message(message.conversation))

    _answer(compile_all, load)
    while (message := _receive(Probe | Job)) is not None:
        _answer(work, message)


def _answer(work: Callable[[T], Answer], message: T) -> None:
    """Sends the answer that `work` returns for a message, or a refusal."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # when it expires, SIGPROF kills the process
    try:
        data = frame(work(message))
        if len(data) > MAX_TEXT:
            raise TemplateError(f"the text has more than {MAX_TEXT} bytes")
    except MemoryError:
        os._exit(TOO_MUCH_MEMORY)
    except Exception as error:  # noqa: BLE001  # templates may raise any exception
        data = frame(Answer(refusal=_reason(error)))
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _reason(error: Exception) -> str:
    """Returns the reason for clients: the message of the template, of Jinja or of an operation on the messages."""
    reason = error.message if isinstance(error, TemplateError) else None
    return (reason or f"{type(error).__name__}: {error}")[:MAX_REASON].encode(errors="replace").decode()


def _receive(kind: Any) -> Any:
    """Returns the next message, or None at the end of input."""
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "little")
    data = sys.stdin.buffer.read(length)
    return msgspec.msgpack.decode(data, type=kind) if data else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
