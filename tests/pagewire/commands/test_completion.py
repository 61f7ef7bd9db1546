"""Completion in shells: bash runs its script; zsh and fish, where they are installed, read theirs."""

import argparse
import shutil
import subprocess

import pytest

from pagewire.commands import completion
from pagewire.commands.parser import COMMANDS, parsers
from pagewire.shared.settings.config import FIELDS
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    verbs = list(completion.verbs(parsers()))
    return {shell: script(verbs) for shell, script in completion.SHELLS.items()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["st"], {"status"}),
        ([""], {*COMMANDS, "--help", "--version"}),
        (["serve", "--dtype", ""], {"auto", "float32", "bfloat16", "float16"}),
        (["serve", "--lease-w"], {"--lease-window"}),
        (["serve", "--num-kv-blocks", ""], set()),
        (["bench", "qua"], {"quality"}),
        (["completion", ""], {"bash", "fish", "zsh"}),
        (["chat", "--temp"], {"--temperature"}),
        (["serve", "--prefix-cache", "--no-prefix-c"], {"--no-prefix-cache"}),
    ],
)
def test_bash_completes_commands_flags_and_values(scripts: dict[str, str], line: list[str], expected: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["pagewire", *line])
    script = f'{scripts["bash"]}\nCOMP_WORDS=({words}); COMP_CWORD={len(line)}; _pagewire; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_every_command_and_setting(scripts: dict[str, str], shell: str) -> None:
    script = scripts[shell]
    assert all(name in script for name in COMMANDS)
    flag = "-l " if shell == "fish" else "--"
    assert all(f"{flag}{name}" in script for name in FIELDS)


@pytest.mark.parametrize("shell", [shell for shell in completion.SHELLS if shutil.which(shell)])
def test_a_shell_can_read_its_script(scripts: dict[str, str], shell: str) -> None:
    done = subprocess.run(
        [shell, "-n"], input=scripts[shell], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_hidden_flags_are_not_completed() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shown", action="store_true", help="is shown: [a] it's")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    (verb,) = completion.verbs({"verb": parser})
    assert [flag for option in verb.options for flag in option.flags] == ["-h", "--help", "--shown"]
    assert r"[is shown\: \[a\] it" in completion.zsh([verb])
    assert r"it\'s" in completion.fish([verb])
