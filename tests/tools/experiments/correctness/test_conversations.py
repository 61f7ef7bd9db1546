"""Every valid conversation becomes a prompt with every template; what `transformers` renders whole is not touched."""

from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from tests.support.model_folders import TEMPLATES
from tools.experiments.correctness.conversations import main, outcome_of, table
from tools.experiments.correctness.inputs.api_conversations import CONVERSATIONS

PAGE = (Path(__file__).parents[4] / "docs" / "chat.md").read_text()


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_every_conversation_becomes_a_prompt_without_a_loss(path: Path) -> None:
    outcome = outcome_of(path.read_text())
    assert outcome.refused == {}
    assert outcome.changed == []
    assert outcome.lossy == {}
    assert len(outcome.equal) + len(outcome.mended) == len(CONVERSATIONS) >= 40
    assert len(outcome.equal) >= 10
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {path.stem} |"))
    assert row in table({path.stem: outcome}), "docs/chat.md has other figures"


def test_a_folder_is_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.jinja").write_text("{% for m in messages %}{{ m }}{% endfor %}{{ tools }}<tool_call>arguments")
    (tmp_path / "none.jinja").write_text("{{ raise_exception('closed') }}")
    assert main([str(tmp_path)]) == 0
    header, _, everything, nothing, *reasons = capsys.readouterr().out.splitlines()
    assert header == "| template | as `transformers` | mended | refused |"
    assert everything == "| all | 38 | 0 | 2 |"
    assert nothing == "| none | 0 | 0 | 40 |"
    assert "none: /v1/chat/completions, a question: refused: messages[0]: closed" in reasons


def test_a_folder_without_templates_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give a folder"):
        main([str(tmp_path)])
