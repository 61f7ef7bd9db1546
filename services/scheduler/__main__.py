"""Entry point: `python -m pagewire.services.scheduler`."""

from pagewire.shared.process import lean_imports  # noqa: F401, I001  # first
from pagewire.services.scheduler.service import Scheduler
from pagewire.shared.process.runtime import main

main("scheduler", Scheduler)
