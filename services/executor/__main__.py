"""`python -m services.executor`."""

from services.executor.service import Executor
from shared.runtime import main

main("executor", Executor)
