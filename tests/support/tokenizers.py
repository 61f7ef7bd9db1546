"""Real tokenizers and texts for the tests of the detokenizer."""

import json
import lzma
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from pagewire.services.detokenizer.text.vocabulary import Vocabulary

DATA = Path(__file__).parents[1] / "data"
FILES = {
    "gpt2": Path(__file__).parents[2] / "tools" / "experiments" / "data" / "gpt2.json.xz",
    "phi-3-mini": DATA / "tokenizers" / "phi-3-mini.json.xz",
}
"""Byte-level BPE, and SentencePiece BPE with byte fallback (both MIT)."""
NAMES = tuple(FILES)
PHI_BYTE = 3
"""Id of phi-3-mini's token for byte 0."""


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_str(lzma.decompress(FILES[name].read_bytes()).decode())


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(tokenizer(name))


def token_id(name: str, token: str) -> int:
    """The id of a token that is there."""
    number = tokenizer(name).token_to_id(token)
    assert number is not None
    return number


@cache
def texts() -> list[str]:
    """Hard strings, and the Universal Declaration of Human Rights in ten scripts."""
    cases = (DATA / "detokenization" / "cases_dev.jsonl").read_text().splitlines()
    declarations = (DATA / "multilingual").glob("*.txt")
    return [json.loads(case)["text"] for case in cases] + [
        path.read_text(errors="replace")[:3000] for path in sorted(declarations)
    ]


def hard_cases(name: str) -> list[tuple[list[int], str]]:
    """The ids of the hard strings for a tokenizer, and the texts that its library decodes them to."""
    cases = (DATA / "detokenization" / "cases_dev.jsonl").read_text().splitlines()
    answers = [json.loads(case)["tok"][name] for case in cases]
    return [(case["ids"], case["decoded"]) for case in answers]


def declarations() -> dict[str, str]:
    """The Universal Declaration of Human Rights in ten scripts, by the names of the files."""
    files = sorted((DATA / "multilingual").glob("*.txt"))
    return {path.stem: path.read_text(errors="ignore") for path in files}  # some end within a character


def whole_text(name: str, ids: list[int], *, skip_special: bool = True) -> str:
    """The text of `ids` as the library decodes them at once.

    Bytes of phi-3-mini that are no character are spelled as U+FFFD first: the library would drop the characters around
    them, too.
    """
    library = tokenizer(name)
    if name == "phi-3-mini":
        ids = _well_formed([i for i in ids if _is_seen(library, i, skip_special)])
    return library.decode(ids, skip_special_tokens=skip_special)


def _is_seen(library: Tokenizer, token: int, skip_special: bool) -> bool:
    added = library.get_added_tokens_decoder().get(token)
    return library.id_to_token(token) is not None and not (skip_special and added is not None and added.special)


def _well_formed(ids: list[int]) -> list[int]:
    out: list[int] = []
    run = bytearray()
    for token in [*ids, None]:
        if token is not None and PHI_BYTE <= token < PHI_BYTE + 256:
            run.append(token - PHI_BYTE)
            continue
        out += [PHI_BYTE + byte for byte in _spell(bytes(run)).encode()]
        run.clear()
        if token is not None:
            out.append(token)
    return out


def _spell(run: bytes) -> str:
    """SentencePiece's rule: whole characters, and one U+FFFD for each other byte."""
    text = ""
    while run:
        for length in (1, 2, 3, 4):
            try:
                character = run[:length].decode()
            except UnicodeDecodeError:
                continue
            text, run = text + character, run[length:]
            break
        else:
            text, run = text + "\ufffd", run[1:]
    return text
