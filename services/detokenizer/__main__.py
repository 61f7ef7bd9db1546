"""`python -m services.detokenizer`: one detokenizer in a process of its own."""

from services.detokenizer.service import Detokenizer
from shared.runtime import main

main("detokenizer", Detokenizer)
