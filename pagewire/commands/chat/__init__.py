"""Chats with the model in the terminal, or answers a message from a pipe."""

import argparse

from pagewire.commands import session
from pagewire.commands.generate import add_sampling, sampling_of
from pagewire.shared.settings import flags

MAX_TOKENS = 512
"""Default maximum of tokens per answer: a small model may repeat itself without end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the system message, the sampling parameters and all settings."""
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")
    add_sampling(parser, max_tokens=MAX_TOKENS)
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads messages and prints answers until Ctrl-D or `/exit`; input from a pipe is a single message."""
    # Imported here, because `pagewire --help` and the other commands do not need the terminal libraries.
    from pagewire.commands.chat import answers, terminal
    from pagewire.commands.chat.conversation import Conversation, as_params

    settings = session.quiet(flags.read_settings(arguments))
    conversation = Conversation(system=arguments.system, sampling=sampling_of(arguments, settings))
    as_params(conversation.sampling)
    text = session.piped_text()
    if text is None:
        return session.run(terminal.talk(conversation, settings), settings, until_stopped=True)
    return session.run(answers.answer_once(conversation, text.strip(), settings), settings) if text.strip() else 0
