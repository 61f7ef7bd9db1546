"""The process in which chat templates run: `python -m pagewire.services.tokenizer.chat.worker PARENT`.

A template is a program of whoever published the model. Here it has a share of memory, half a second of computing time
and no secrets in its environment; a template that wants more ends this process and nothing else. The parent sends one
message and waits for its answer before the next: MessagePack behind four bytes of length, on standard input and output.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec
from jinja2 import TemplateError

from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.layout import Conversation, Layout
from pagewire.shared.process import die_with

CPU_SECONDS = 0.5
"""Computing time of one conversation, and of the compilation of all templates."""
MEMORY = 256 * 1024 * 1024
"""Bytes of address space, of which the interpreter and Jinja take 30 MB."""
MAX_TEXT = 32 * 1024 * 1024
"""Bytes of an answer; the ids of such a text fit into no message of the broker."""
TOO_MUCH_MEMORY = 70
"""Exit code of a process whose template wanted more memory than there is."""

MAX_REASON = 500
"""Characters of a refusal."""

LENGTH_BYTES = 4
T = TypeVar("T")


class Load(msgspec.Struct):
    """The first message: the templates to compile."""

    templates: dict[str, str]
    """By name."""
    special: dict[str, str]
    """Special tokens by their names."""


class Job(msgspec.Struct):
    """Every message after it: a conversation, and the template for it."""

    template: str
    conversation: Conversation


class Answer(msgspec.Struct):
    """The answer to each message."""

    text: str = ""
    refusal: str = ""
    """Why there is no text; empty: there is one."""


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def main(parent: int) -> None:
    """Answers messages until standard input is closed."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    load = _receive(Load)
    if load is None:
        return
    layouts: dict[str, Layout] = {}

    def compile_all(load: Load) -> str:
        environment = chat_environment()
        for name, source in load.templates.items():
            layouts[name] = Layout(environment, source, load.special)
        return ""

    def render(job: Job) -> str:
        return layouts[job.template].text(job.conversation)

    _answer(compile_all, load)
    while (job := _receive(Job)) is not None:
        _answer(render, job)


def _answer(work: Callable[[T], str], message: T) -> None:
    """Sends the text that `work` makes of a message, or why there is none."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # at its end the kernel kills the process
    try:
        data = frame(Answer(work(message)))
        if len(data) > MAX_TEXT:
            raise TemplateError(f"the text has more than {MAX_TEXT} bytes")
    except MemoryError:
        os._exit(TOO_MUCH_MEMORY)
    except Exception as error:  # noqa: BLE001  # templates raise whatever they like
        data = frame(Answer(refusal=_reason(error)))
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _reason(error: Exception) -> str:
    """What a client may know: the template's own words, or Jinja's."""
    if isinstance(error, TemplateError) and error.message:
        return error.message[:MAX_REASON].encode(errors="replace").decode()
    return "it is written for others"


def _receive(kind: type[T]) -> T | None:
    """The next message; None at the end."""
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "little")
    data = sys.stdin.buffer.read(length)
    return msgspec.msgpack.decode(data, type=kind) if data else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
