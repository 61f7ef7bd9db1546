"""Compares the vocabularies of llama.cpp with its own ids: `python -m tests.families.gguf_vocabularies FOLDER`.

FOLDER is `models` of llama.cpp's sources, which the source package of `llama-cpp-python` has in `vendor/llama.cpp`:
`ggml-vocab-*.gguf` with texts beside them (`.inp`) and ids (`.out`). The results become a table of docs/models.md.
"""

import sys
from pathlib import Path

from msgspec import structs

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Outcome, Vocabulary
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.families.record import record

PREFIX = "ggml-vocab-"
SEPARATOR = "\n__ggml_vocab_test__\n"


def compared(file: Path) -> Vocabulary:
    """Returns how the ids that a vocabulary gives its texts compare with llama.cpp's."""
    metadata = GgufModel.open(file).metadata
    stated = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    name, kind = file.stem.removeprefix(PREFIX), " ".join(str(each) for each in stated if each)
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    expected = [[int(id_) for id_ in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    try:
        backend = load_tokenizer(file).backend
    except ConfigurationError as error:
        return Vocabulary(name, kind, Outcome.REFUSED, str(error).replace(str(file), "refused: the file"))
    ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    equal = sum(mine == theirs for mine, theirs in zip(ids, expected, strict=False))
    outcome = Outcome.EXACT if equal == len(texts) else Outcome.WRONG
    return Vocabulary(name, kind, outcome, f"{equal} of {len(texts)} texts equal")


def main() -> int:
    """Prints a line per vocabulary and writes the table; returns 1 if any was wrong."""
    files = sorted(file for file in Path(sys.argv[1]).glob(f"{PREFIX}*.gguf") if Path(f"{file}.inp").exists())
    results = tuple(compared(file) for file in files)
    for result in results:
        print(f"{result.name:<16}{result.kind:<24}{result.outcome.value:<10}{result.detail}")
    outcomes = [result.outcome for result in results]
    print(f"{outcomes.count(Outcome.EXACT)} of {len(results)} equal")
    record(structs.replace(supported_models.read(), vocabularies=results))
    return int(Outcome.WRONG in outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
