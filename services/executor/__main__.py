"""`python -m pagewire.services.executor`."""

from pagewire.services.executor.service import Executor
from pagewire.shared.process.runtime import main

main("executor", Executor)
