"""`python -m pagewire.services.executor.devices.cuda.ranks`, which only rank 0 starts."""

from pagewire.services.executor.devices.cuda.ranks.follower import follow
from pagewire.services.executor.devices.ranks.follower import run_rank

run_rank(follow)
