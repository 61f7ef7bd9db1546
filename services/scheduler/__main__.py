"""Entry point: `python -m services.scheduler`."""

from services.scheduler.service import Scheduler
from shared.runtime import main

main("scheduler", Scheduler)
