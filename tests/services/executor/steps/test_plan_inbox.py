"""Plans reach the thread in order, without a gap, of one term only."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.steps.plan_inbox import MAX_OUT_OF_ORDER, NewPlans, PlanInbox
from tests.services.executor.fakes import PATIENCE, plan


def arrived(inbox: PlanInbox) -> NewPlans:
    news = inbox.take(wait=False)
    assert news is not None
    return news


def numbers(inbox: PlanInbox) -> list[int]:
    return [each.number for each in arrived(inbox).plans]


@given(st.lists(st.integers(1, 12)))
def test_plans_are_dense_and_in_order_whatever_arrives(sent: list[int]) -> None:
    inbox = PlanInbox()
    inbox.begin(1)
    taken: list[int] = []
    for number in sent:
        inbox.put(plan(number))
        taken += numbers(inbox)
    dense = next(number for number in range(1, 14) if number not in sent)
    assert taken == list(range(1, dense))
    assert inbox.last == dense - 1


def test_plans_behind_a_gap_are_bounded() -> None:
    inbox = PlanInbox()
    inbox.begin(1)
    for number in range(2, MAX_OUT_OF_ORDER + 10):
        inbox.put(plan(number))
    assert numbers(inbox) == []
    inbox.put(plan(1))
    assert numbers(inbox) == list(range(1, MAX_OUT_OF_ORDER + 2))
    inbox.put(plan(MAX_OUT_OF_ORDER + 2))  # dropped before, sent again
    assert numbers(inbox) == [MAX_OUT_OF_ORDER + 2]


def test_another_term_is_dropped() -> None:
    inbox = PlanInbox()
    inbox.put(plan(1, term=1))
    inbox.begin(2)
    inbox.put(plan(1, term=1))
    inbox.put(plan(1, term=3))
    assert arrived(inbox) == NewPlans(2, [])
    assert inbox.last == 0


def test_a_new_term_forgets_the_plans_of_the_old_one() -> None:
    inbox = PlanInbox()
    inbox.begin(1)
    inbox.put(plan(1))
    inbox.put(plan(3))
    inbox.begin(2)
    inbox.put(plan(1, term=2))
    inbox.put(plan(2, term=2))
    term, plans = arrived(inbox)
    assert term == 2
    assert [(each.term, each.number) for each in plans] == [(2, 1), (2, 2)]


def test_take_waits_for_a_plan_that_can_be_applied() -> None:
    inbox = PlanInbox()
    inbox.begin(1)
    assert arrived(inbox) == NewPlans(1, [])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(inbox.take, wait=True)
        inbox.put(plan(2))
        assert not waiting.done()
        inbox.put(plan(1))
        news = waiting.result(PATIENCE)
    assert news is not None
    assert [each.number for each in news.plans] == [1, 2]


def test_closing_ends_a_wait() -> None:
    inbox = PlanInbox()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(inbox.take, wait=True)
        inbox.close()
        assert waiting.result(PATIENCE) is None
    assert inbox.take(wait=False) is None
