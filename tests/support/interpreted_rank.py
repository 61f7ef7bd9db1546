"""`python -m tests.support.interpreted_rank`: a rank other than 0, under Triton's interpreter."""

from tests.support.interpreted import interpreted

with interpreted():
    from pagewire.services.executor.devices.cuda.ranks.follower import follow
    from pagewire.services.executor.devices.ranks.follower import run_rank

    run_rank(follow)
