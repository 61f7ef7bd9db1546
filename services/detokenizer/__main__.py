"""`python -m pagewire.services.detokenizer`: one detokenizer in a process of its own."""

from pagewire.shared.process import lean_imports  # noqa: F401, I001  # first
from pagewire.services.detokenizer.service import Detokenizer
from pagewire.shared.process.runtime import main

main("detokenizer", Detokenizer)
