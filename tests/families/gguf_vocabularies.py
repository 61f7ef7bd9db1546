"""Compares the vocabularies of llama.cpp with its own ids: `python -m tests.families.gguf_vocabularies FOLDER`.

FOLDER is `models` of llama.cpp's sources: `ggml-vocab-*.gguf` with texts beside them (`.inp`) and ids (`.out`).
"""

import sys
from pathlib import Path

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.tokenizer_files import load_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"


def compared(file: Path) -> str:
    """How the ids of a vocabulary compare."""
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    expected = [[int(id_) for id_ in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    try:
        backend = load_tokenizer(file).backend
    except ConfigurationError as error:
        return f"refused: {str(error).removeprefix(str(file)).strip()}"
    ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    equal = sum(mine == theirs for mine, theirs in zip(ids, expected, strict=False))
    return "equal" if equal == len(texts) else f"WRONG: {equal} of {len(texts)} texts"


def main() -> int:
    """Prints a line per vocabulary; returns 1 if any was wrong."""
    results = []
    for file in sorted(Path(sys.argv[1]).glob("ggml-vocab-*.gguf")):
        if Path(f"{file}.inp").exists():
            results.append(compared(file))
            print(f"{file.stem.removeprefix('ggml-vocab-'):<20}{results[-1]}", flush=True)
    print(f"{results.count('equal')} of {len(results)} equal")
    return int(any(result.startswith("WRONG") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
