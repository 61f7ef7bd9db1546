"""`python -m pagewire.services.tokenizer`."""

from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared.process.runtime import main

main("tokenizer", Tokenizer)
