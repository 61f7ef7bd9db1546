"""Writes a model folder without weights, for a simulated device: `pagewire serve --device sim:h100 --model FOLDER`.

The config.json is that of a published model; the tokenizer is the bundled model's, so ids beyond its vocabulary have
no text.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.settings.flags import Parser


def _llama(hidden: int, inner: int, layers: int, heads: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _llama(hidden, inner, layers, heads, 151936, 40960) | {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _llama(4096, 14336, 32, 32, 128256, 8192),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 128256, 8192),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 32000, 4096),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
}
"""config.json of published models, as far as time depends on it."""


def write_folder(name: str, folder: Path) -> None:
    """Makes `folder` a model folder of the shape `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {"eos_token_id": json.loads((BUNDLED / "config.json").read_text())["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in BUNDLED.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def main(arguments: list[str]) -> int:
    """Writes a model folder."""
    parser = Parser(prog="pagewire bench shapes", description=__doc__)
    parser.add_argument("name", choices=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("folder", type=Path, help="is made if it does not exist")
    options = parser.parse_args(arguments)
    write_folder(options.name, options.folder)
    print(f"{options.folder}: {options.name} without weights")
    return 0
