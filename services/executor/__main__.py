"""`python -m services.executor`."""

import os

# OpenMP reads this when torch is loaded. Threads that spin while they wait for each other starve the other services of
# the machine, and then themselves: on two busy cores a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from services.executor.service import Executor
from shared.runtime import main

main("executor", Executor)
