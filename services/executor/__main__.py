"""`python -m pagewire.services.executor`."""

import os

from pagewire.services.executor.rank_processes import start_early
from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()
start_early(os.environ)

from pagewire.services.executor.service import Executor  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("executor", Executor)
