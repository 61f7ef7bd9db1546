import subprocess
import sys
import time

import pytest

from pagewire.bench._chaos.false_clock import COMPILER, false_clock
from tests.support.waiting import PATIENCE

CODE = (
    "import datetime, time; time.sleep(0.01); print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
)


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.parametrize("skew", [0.0, 600.0, -600.0])
def test_only_the_time_of_day_of_new_processes_is_wrong(skew: float) -> None:
    with false_clock() as clock:
        clock.set(skew)
        before = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        now = time.time()
    moment, date, monotonic = map(float, done.stdout.split())
    assert abs(moment - now - skew) < PATIENCE / 2
    assert abs(date - moment) < PATIENCE / 2
    assert before < monotonic < before + PATIENCE
