import math

import pytest

from pagewire.bench import prefix
from pagewire.bench.prefix import Stopwatch, measure
from pagewire.services.scheduler.policy import Policy
from pagewire.services.scheduler.prefix_cache import PrefixCache


def test_no_prompt_is_found_and_the_cache_is_a_small_part() -> None:
    figures = measure(math.inf, requests=40)
    assert figures.requests == 40
    assert figures.hits == 0
    assert 0 < figures.caching < figures.scheduling / 4


def test_what_was_timed_is_itself_again() -> None:
    before = dict(vars(PrefixCache)), Policy.schedule
    measure(8.0, requests=5)
    assert (dict(vars(PrefixCache)), Policy.schedule) == before


def test_a_stopwatch_counts_what_ends_with_an_error_too() -> None:
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError):
        watch.around(lambda: 1 // 0)()
    assert watch.around(lambda number: number + 1)(1) == 2
    assert watch.calls == 2
    assert watch.seconds > 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix.main(["--requests", "20", "--qps", "16"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split("|")[1].strip() == "simulated"
    assert row.split("|")[1:4] == [" 16 QPS ", " 20 ", " 0 "]
    assert row.rstrip().endswith("% |")
