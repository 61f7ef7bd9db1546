"""Entry point: `python -m pagewire.services.scheduler`."""

from pagewire.shared.process.lean_imports import leave_out_unused

leave_out_unused()

from pagewire.services.scheduler.service import Scheduler  # noqa: E402
from pagewire.shared.process.runtime import main  # noqa: E402

main("scheduler", Scheduler)
