"""`python -m pagewire.services.detokenizer`: one detokenizer in a process of its own."""

from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()

from pagewire.services.detokenizer.service import Detokenizer  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("detokenizer", Detokenizer)
