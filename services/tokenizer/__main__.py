"""`python -m services.tokenizer`."""

from services.tokenizer.service import Tokenizer
from shared.runtime import main

main("tokenizer", Tokenizer)
