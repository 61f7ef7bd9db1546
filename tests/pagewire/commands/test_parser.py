import subprocess
import sys

import pytest

from pagewire import cli
from pagewire.commands.parser import COMMANDS, build_parser, parsers
from pagewire.shared.settings.flags import read_settings
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


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("srve", "did you mean serve?"),
        ("run smollm2", "`pagewire chat --model NAME`"),
        ("list", "`pagewire models`"),
        ("ps", "`pagewire status`"),
        ("stop", "Ctrl-C"),
        ("rm x", "`pagewire models --remove NAME`"),
        ("show x", "`pagewire doctor --model NAME`"),
        ("serve --max-num-sqs 3", "did you mean --max-num-seqs?"),
        ("serve --max_num_sqs=3", "did you mean --max-num-seqs?"),
        ("serve --max-num 3", "did you mean --max-num-seqs?"),
        ("status --metrics-compt vllm", "did you mean --metrics-compat?"),
        ("generate --tempereture 1 x", "did you mean --temperature?"),
        ("completion bsh", "did you mean bash?"),
        ("bench pipline", "did you mean pipeline?"),
        ("bench serve --num-prom 3", "did you mean --num-prompts?"),
        ("serve --xyzzy", "there is no such flag here"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_right_one(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_flags_have_both_spellings() -> None:
    line = ["serve", "--max_num_seqs", "3", "--no-prefix_cache", "--kv_cache-memory=1GiB", "--tokenizer=a_b"]
    settings = read_settings(build_parser().parse_args(line))
    assert (settings.max_num_seqs, settings.prefix_cache, settings.tokenizer) == (3, False, "a_b")
    assert settings.kv_cache_memory == 1 << 30
