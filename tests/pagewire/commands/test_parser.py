import subprocess
import sys

from pagewire.commands.parser import COMMANDS, parsers
from tests.support.waiting import PATIENCE


def test_help_imports_no_command() -> None:
    """The help needs imports of a tenth of a second; all commands together take half of one."""
    code = "import sys; from pagewire.commands import parser; parser.build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"asyncio", "nats", "numpy", "torch", "pagewire.commands.serve", "importlib.metadata"}


def test_every_command_has_a_parser() -> None:
    commands = parsers()
    assert list(commands) == list(COMMANDS)
    assert all(parser.description for parser in commands.values())
