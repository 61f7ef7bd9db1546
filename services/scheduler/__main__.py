"""Entry point: `python -m pagewire.services.scheduler`."""

from pagewire.services.scheduler.service import Scheduler
from pagewire.shared.process.runtime import main

main("scheduler", Scheduler)
