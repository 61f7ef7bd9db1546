from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.ordering import AGEING, Line, rank
from pagewire.services.scheduler.sequence import Sequence
from tests.services.scheduler.cases import sequence


def line(*waiting: Sequence) -> Line:
    made = Line()
    for one in waiting:
        made.add(one)
    return made


def serve(made: Line, count: int) -> list[Sequence]:
    """As the policy does: one after the other, each charged for its prompt."""
    served = []
    for _ in range(count):
        one = next(made.turns())
        made.begin(one)
        made.charge(one.user, len(one.tokens))
        served.append(one)
    return served


def test_equals_go_in_order_of_arrival() -> None:
    first, second, third = (sequence() for _ in range(3))
    assert list(line(third, first, second).turns()) == [first, second, third]


def test_a_better_priority_goes_first() -> None:
    late = sequence(priority=-1, arrived=5.0)
    assert next(line(sequence(arrived=1.0), late).turns()) is late


def test_waiting_makes_up_for_priority_after_the_stated_time() -> None:
    old = sequence(priority=1, arrived=0.0)
    assert next(line(old, sequence(arrived=AGEING + 0.1)).turns()) is old
    assert next(line(old, sequence(arrived=AGEING - 0.1)).turns()) is not old
    assert next(line(old, sequence(priority=-1, arrived=2 * AGEING + 0.1)).turns()) is old


def test_one_request_passes_a_thousand_of_another_user() -> None:
    crowd = [sequence(10, user="a", arrived=0.0) for _ in range(1000)]
    made = line(*crowd)
    serve(made, 20)
    alone = sequence(10, user="b", arrived=60.0)
    made.add(alone)
    assert alone in serve(made, 2)


def test_users_get_equal_tokens_and_not_equal_requests() -> None:
    long = [sequence(300, user="long") for _ in range(40)]
    short = [sequence(30, user="short") for _ in range(400)]
    served = serve(line(*long, *short), 110)
    tokens = {user: sum(len(s.tokens) for s in served if s.user == user) for user in ("long", "short")}
    assert abs(tokens["long"] - tokens["short"]) <= 300


def test_what_is_generated_counts_too() -> None:
    made = line(*(sequence(user=user) for user in "abab"))
    made.charge("a", 100)
    assert [s.user for s in made.turns()] == ["b", "b", "a", "a"]


def test_nobody_saves_up_turns() -> None:
    made = line(*(sequence(10, user="a") for _ in range(100)))
    serve(made, 50)
    for _ in range(50):
        made.add(sequence(10, user="back"))
    users = [s.user for s in serve(made, 20)]
    assert 9 <= users.count("back") <= 11


def test_fairness_does_not_bring_a_worse_priority_forward() -> None:
    made = line(*(sequence(user="a", arrived=1.0) for _ in range(3)), sequence(user="b", priority=1, arrived=1.0))
    made.charge("a", 1000)
    assert [s.user for s in made.turns()] == ["a", "a", "a", "b"]


def test_choices_of_one_request_are_told_apart() -> None:
    choices = [sequence(arrival=1) for _ in range(3)]
    made = line(*choices)
    made.remove(choices[1])
    assert list(made) == [choices[0], choices[2]]


def test_the_turns_are_not_disturbed_by_what_is_taken_out() -> None:
    waiting = [sequence(user=user) for user in "ababab"]
    made = line(*waiting)
    turns = list(made.turns())
    seen = []
    for one in made.turns():
        made.remove(one)
        seen.append(one)
    assert seen == turns
    assert len(made) == 0


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.floats(0, 100), st.integers(1, 50)), max_size=30)
)
def test_everybody_has_a_turn_and_users_keep_their_own_order(waiting: list[tuple[int, str, float, int]]) -> None:
    all_of_them = [sequence(n, priority=p, user=u, arrived=at) for p, u, at, n in waiting]
    turns = list(line(*all_of_them).turns())
    assert {s.id for s in turns} == {s.id for s in all_of_them}
    assert len(turns) == len(all_of_them)
    for priority in range(-2, 3):
        for user in "abc":
            own = [rank(s) for s in turns if (s.priority, s.user) == (priority, user)]
            assert own == sorted(own)
    if turns:
        oldest = min(all_of_them, key=rank)
        assert next(islice(turns, 1)).priority == oldest.priority
