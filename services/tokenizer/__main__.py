"""`python -m pagewire.services.tokenizer`."""

from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()

from pagewire.services.tokenizer.service import Tokenizer  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("tokenizer", Tokenizer)
