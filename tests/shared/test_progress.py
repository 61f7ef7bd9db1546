import os
import pty
import subprocess
import sys
import termios

CODE = "from pagewire.shared.progress import shown; print(*shown(['a', 'b'], 'loading'))"


def test_without_a_terminal_nothing_is_drawn() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=20, check=True)
    assert (done.stdout, done.stderr) == ("a b\n", "")


def test_on_a_terminal_a_bar_is_drawn_on_standard_error() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=20, check=True)
        drawn = terminal.read(4096)
        os.close(theirs)
    assert done.stdout == "a b\n"
    assert b"loading" in drawn
    assert b"2/2" in drawn or b"0/2" in drawn
