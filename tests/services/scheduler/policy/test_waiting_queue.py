from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.services.scheduler.policy.waiting_queue import AGEING, WaitingQueue, rank
from tests.services.scheduler.policy.cases import sequence


def queue_of(*waiting: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for one in waiting:
        queue.add(one)
    return queue


def serve(queue: WaitingQueue, count: int) -> list[Sequence]:
    """As the policy does: one after the other, each charged for its prompt."""
    served = []
    for _ in range(count):
        one = next(queue.in_order())
        queue.pop(one)
        queue.charge(one.user, len(one.tokens))
        served.append(one)
    return served


def test_requests_of_equal_priority_go_in_order_of_arrival() -> None:
    first, second, third = (sequence() for _ in range(3))
    assert list(queue_of(third, first, second).in_order()) == [first, second, third]


def test_a_request_of_a_better_priority_goes_first() -> None:
    late = sequence(priority=-1, arrival_time=5.0)
    assert next(queue_of(sequence(arrival_time=1.0), late).in_order()) is late


def test_waiting_makes_up_for_priority_after_the_stated_time() -> None:
    old = sequence(priority=1, arrival_time=0.0)
    assert next(queue_of(old, sequence(arrival_time=AGEING + 0.1)).in_order()) is old
    assert next(queue_of(old, sequence(arrival_time=AGEING - 0.1)).in_order()) is not old
    assert next(queue_of(old, sequence(priority=-1, arrival_time=2 * AGEING + 0.1)).in_order()) is old


def test_one_request_passes_a_thousand_of_another_user() -> None:
    crowd = [sequence(10, user="a", arrival_time=0.0) for _ in range(1000)]
    queue = queue_of(*crowd)
    serve(queue, 20)
    alone = sequence(10, user="b", arrival_time=60.0)
    queue.add(alone)
    assert alone in serve(queue, 2)


def test_users_get_equal_tokens_and_not_equal_requests() -> None:
    long = [sequence(300, user="long") for _ in range(40)]
    short = [sequence(30, user="short") for _ in range(400)]
    served = serve(queue_of(*long, *short), 110)
    tokens = {user: sum(len(s.tokens) for s in served if s.user == user) for user in ("long", "short")}
    assert abs(tokens["long"] - tokens["short"]) <= 300


def test_generated_tokens_are_charged_too() -> None:
    queue = queue_of(*(sequence(user=user) for user in "abab"))
    queue.charge("a", 100)
    assert [s.user for s in queue.in_order()] == ["b", "b", "a", "a"]


def test_a_pause_earns_no_credit() -> None:
    queue = queue_of(*(sequence(10, user="a") for _ in range(100)))
    serve(queue, 50)
    for _ in range(50):
        queue.add(sequence(10, user="back"))
    users = [s.user for s in serve(queue, 20)]
    assert 9 <= users.count("back") <= 11


def test_fairness_does_not_bring_a_worse_priority_forward() -> None:
    queue = queue_of(
        *(sequence(user="a", arrival_time=1.0) for _ in range(3)), sequence(user="b", priority=1, arrival_time=1.0)
    )
    queue.charge("a", 1000)
    assert [s.user for s in queue.in_order()] == ["a", "a", "a", "b"]


def test_choices_of_one_request_are_distinguished() -> None:
    choices = [sequence(arrival_order=1) for _ in range(3)]
    queue = queue_of(*choices)
    queue.remove(choices[1])
    assert list(queue) == [choices[0], choices[2]]


def test_the_order_does_not_change_when_sequences_are_removed() -> None:
    waiting = [sequence(user=user) for user in "ababab"]
    queue = queue_of(*waiting)
    ordered = list(queue.in_order())
    order = []
    for one in queue.in_order():
        queue.remove(one)
        order.append(one)
    assert order == ordered
    assert len(queue) == 0


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.floats(0, 100), st.integers(1, 50)), max_size=30)
)
def test_every_sequence_is_yielded_and_users_keep_their_own_order(waiting: list[tuple[int, str, float, int]]) -> None:
    all_of_them = [sequence(n, priority=p, user=u, arrival_time=at) for p, u, at, n in waiting]
    ordered = list(queue_of(*all_of_them).in_order())
    assert {s.id for s in ordered} == {s.id for s in all_of_them}
    assert len(ordered) == len(all_of_them)
    for priority in range(-2, 3):
        for user in "abc":
            own = [rank(s) for s in ordered if (s.priority, s.user) == (priority, user)]
            assert own == sorted(own)
    if ordered:
        oldest = min(all_of_them, key=rank)
        assert next(islice(ordered, 1)).priority == oldest.priority
