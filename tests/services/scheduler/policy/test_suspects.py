from pagewire.services.scheduler.policy.suspects import Suspects


def test_a_request_that_fails_alone_is_guilty_at_once() -> None:
    suspects = Suspects()
    assert suspects.step_failed({"a"}) == "a"
    assert suspects.on_trial == ""
    assert suspects.may_run("b")


def test_requests_of_a_failed_step_run_alone_one_by_one() -> None:
    suspects = Suspects()
    assert suspects.step_failed({"b", "a", "c"}) == ""
    assert suspects.on_trial == "a"
    assert suspects.may_run("a")
    assert not suspects.may_run("b")
    assert not suspects.may_run("stranger")
    suspects.clear("a")
    assert suspects.on_trial == "b"
    assert suspects.step_failed({"b"}) == "b"
    assert suspects.on_trial == "c"
    suspects.clear("c")
    assert suspects.may_run("stranger")


def test_one_lost_executor_makes_no_suspect() -> None:
    """A crash hits a long batch twice by chance."""
    suspects = Suspects()
    assert suspects.executor_lost({"a": 5, "b": 7}) == ""
    assert suspects.on_trial == ""
    assert suspects.executor_lost({"a": 6, "b": 8}) == "", "there were new tokens in between"
    assert suspects.on_trial == ""


def test_a_request_that_was_alone_by_chance_is_not_blamed_for_a_lost_executor() -> None:
    suspects = Suspects()
    assert suspects.executor_lost({"a": 5}) == ""
    assert suspects.executor_lost({"a": 5}) == ""
    assert suspects.on_trial == "a"
    assert suspects.executor_lost({"a": 5}) == "a"


def test_two_lost_executors_without_a_new_token_make_suspects() -> None:
    suspects = Suspects()
    suspects.executor_lost({"a": 5, "b": 7, "c": 1})
    suspects.executor_lost({"a": 5, "b": 7, "c": 2, "d": 1})
    assert suspects.on_trial == "a"
    suspects.clear("a")
    assert suspects.on_trial == "b"
    assert suspects.executor_lost({"b": 7}) == "b"
    assert suspects.may_run("c")


def test_an_executor_lost_without_the_request_on_trial_proves_nothing() -> None:
    suspects = Suspects()
    suspects.step_failed({"a", "b"})
    assert suspects.executor_lost({}) == ""
    assert suspects.on_trial == "a"


def test_a_request_that_is_gone_is_no_suspect() -> None:
    suspects = Suspects()
    suspects.step_failed({"a", "b", "c"})
    suspects.retain({"b"})
    assert suspects.on_trial == "b"
    suspects.clear("b")
    assert suspects.on_trial == ""


def test_a_request_beside_sequences_that_have_just_ended_was_not_alone() -> None:
    suspects = Suspects()
    assert suspects.step_failed({"a"}, strangers=True) == ""
    assert suspects.on_trial == "a"
    assert suspects.step_failed((), strangers=True) == "a", "on trial, all sequences are its own"
