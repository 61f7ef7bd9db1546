"""`python -m pagewire.services.executor`."""

from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()

from pagewire.services.executor.service import Executor  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("executor", Executor)
