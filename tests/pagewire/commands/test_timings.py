from pagewire.commands.timings import Timings


def test_the_rate_counts_from_the_first_token() -> None:
    now = 10.0
    timings = Timings(lambda: now)
    now = 10.25
    timings.count(1)
    now = 12.25
    timings.count(3)
    assert (timings.first, timings.tokens, timings.rate) == (0.25, 4, 1.5)
    assert str(timings) == "time to first token 250 ms, 4 tokens, 1.5 tokens/s"


def test_one_token_has_no_rate() -> None:
    timings = Timings(lambda: 1.0)
    timings.count(1)
    assert timings.rate == 0.0
    assert str(timings) == "time to first token 0 ms, 1 token"
