import io
import itertools

import pytest
from rich.console import Console

from pagewire.commands.chat.markdown import INTERVAL, MarkdownWriter, split_finished

ANSWER = """\
# Title

A paragraph of
two lines.

1. one

2. two

```python
def f():

    return 1
```

The end.
"""


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one paragraph\nof two lines\n", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("1. item\n\n   its second paragraph", ""),
        ("```\ncode\n\nmore", ""),
        ("```\ncode\n\nmore\n```\n\nbehind", "```\ncode\n\nmore\n```\n\n"),
        ("````\n```\n\nx\n````\n\ny", "````\n```\n\nx\n````\n\n"),
        ("~~~\n```\n\nx", ""),
        ("```\ncode\n\n```python\n\nstill code", ""),
    ],
)
def test_a_block_is_finished_when_the_next_begins(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text.removeprefix(finished))


def screen(output: str, height: int) -> list[str]:
    """A terminal of unlimited history: lines above the screen stay as they are."""
    lines, row = [""], 0
    for sequence in output.replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\r", "").split("\x1b["):
        part = sequence.removeprefix("1A").removeprefix("2K")
        if sequence.startswith("1A"):
            row -= 1
            assert len(lines) - row <= height, "the cursor is moved above the top of the screen"
        elif sequence.startswith("2K"):
            lines[row] = ""
        for number, text in enumerate(part.split("\n")):
            if number:
                row += 1
                lines += [""] * (row == len(lines))
            lines[row] += text
    return [line.rstrip() for line in lines]


def console(height: int = 25) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=40, height=height, legacy_windows=False
    )


def drawn(parts: list[str], height: int) -> list[str]:
    out = console(height)
    clock = itertools.count(step=INTERVAL)
    with MarkdownWriter(out, clock.__next__) as writer:
        for part in parts:
            writer.write(part)
    assert isinstance(out.file, io.StringIO)
    return screen(out.file.getvalue(), height)


@pytest.mark.parametrize("height", [4, 25])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_text_is_printed_once_however_it_is_split(size: int, height: int) -> None:
    text = ANSWER + "\n" + "a long paragraph " * 40
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    lines = [line.strip() for line in drawn(parts, height) if line.strip()]
    assert lines.count("A paragraph of two lines.") == 1
    assert lines.count("return 1") == 1
    assert [line for line in lines if line.startswith(("1 ", "2 "))] == ["1 one", "2 two"]
    assert " ".join(lines[lines.index("The end.") + 1 :]) == ("a long paragraph " * 40).strip()


def test_an_unfinished_block_is_shown() -> None:
    out = console()
    assert isinstance(out.file, io.StringIO)
    with MarkdownWriter(out) as writer:
        writer.write("Half a sen")
        assert "Half a sen" in out.file.getvalue()


def test_a_block_is_drawn_at_most_once_per_interval() -> None:
    out = console()
    assert isinstance(out.file, io.StringIO)
    with MarkdownWriter(out, lambda: 1.0) as writer:
        for _ in range(100):
            writer.write("word ")
    assert out.file.getvalue().count("word word word") <= 2 * len("word " * 100) // 40 + 2


def test_an_empty_text_draws_nothing() -> None:
    assert not "".join(drawn([], 25)).strip()
    assert not "".join(drawn([""], 25)).strip()
