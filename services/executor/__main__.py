"""`python -m pagewire.services.executor`."""

from pagewire.shared.process import lean_imports  # noqa: F401, I001  # first
from pagewire.services.executor.service import Executor
from pagewire.shared.process.runtime import main

main("executor", Executor)
