from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.rendezvous import rank

instances = st.sets(st.text("abcdef0123456789", min_size=1, max_size=12), min_size=1, max_size=8)
request_ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(request_ids, instances)
def test_every_instance_is_ranked_once_whatever_the_order_of_arrival(request_id: str, names: set[str]) -> None:
    ranked = rank(request_id, sorted(names))
    assert sorted(ranked) == sorted(names)
    assert ranked == rank(request_id, sorted(names, reverse=True))


@given(request_ids, instances, st.data())
def test_the_order_of_the_others_stays_when_an_instance_leaves(
    request_id: str, names: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    assert rank(request_id, names - {gone}) == [name for name in rank(request_id, names) if name != gone]


def test_requests_spread_evenly() -> None:
    names = ["a", "b", "c", "d"]
    firsts = Counter(rank(f"request-{number}", names)[0] for number in range(4000))
    assert set(firsts) == set(names)
    assert all(850 < count < 1150 for count in firsts.values())


def test_the_second_choices_spread_too() -> None:
    names = ["a", "b", "c", "d"]
    ranked = [rank(f"request-{number}", names) for number in range(3000)]
    seconds = Counter(order[1] for order in ranked if order[0] == "a")
    assert set(seconds) == {"b", "c", "d"}
    assert min(seconds.values()) > 0.25 * sum(seconds.values())


def test_the_ranking_of_no_instances_is_empty() -> None:
    assert rank("request", []) == []
