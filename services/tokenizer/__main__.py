"""`python -m pagewire.services.tokenizer`."""

from pagewire.shared.process import lean_imports  # noqa: F401, I001  # first
from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared.process.runtime import main

main("tokenizer", Tokenizer)
