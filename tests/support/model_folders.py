"""Model folders without weights: all that a tokenizer reads."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, processors

from pagewire.shared.models.model_folder import BUNDLED

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"
"""Chat templates of Qwen2.5, Qwen3 and SmolLM3 (Apache-2.0)."""
SIMPLE_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_folder(path: Path, *, template: str = "", begin: str = "") -> Path:
    """The bundled model's folder without weights, with a chat template and a token that begins each prompt."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, path / name)
    if template:
        (path / "chat_template.jinja").write_text(template)
    if begin:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def change(file: Path, **values: object) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
