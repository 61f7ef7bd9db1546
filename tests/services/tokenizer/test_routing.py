"""Where requests go. Loads, caches and prompts are drawn: what is stated holds for all of them."""

from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.routing import SLACK, Replica, matched, route
from pagewire.shared.subjects import ANY

PROMPT = list(range(8))
"""Hashes of a prompt's prefixes."""


@st.composite
def replicas(draw: st.DrawFn, least: int = 2) -> list[Replica]:
    count = draw(st.integers(least, 6))
    return [
        Replica(
            instance=f"r{i}",
            slots=draw(st.integers(1, 64)),
            load=draw(st.integers(0, 100)),
            cached=draw(st.sets(st.integers(0, 12), max_size=6)),
        )
        for i in range(count)
    ]


def busy(replica: Replica) -> float:
    return replica.load / replica.slots


@given(st.text(max_size=8), replicas())
def test_nobody_who_is_too_busy_is_chosen(name: str, found: list[Replica]) -> None:
    target = route(name, PROMPT, found)
    chosen = {replica.instance: replica for replica in found}.get(target)
    assert chosen is not None or target == ANY
    if chosen is not None:
        assert busy(chosen) <= min(map(busy, found)) + SLACK


@given(st.text(max_size=8), replicas())
def test_nobody_of_those_who_may_has_more_of_the_prefix(name: str, found: list[Replica]) -> None:
    target = route(name, PROMPT, found)
    near = [replica for replica in found if busy(replica) <= min(map(busy, found)) + SLACK]
    longest = max(matched(PROMPT, replica.cached) for replica in near)
    had = [matched(PROMPT, replica.cached) for replica in near if replica.instance == target]
    assert had == [longest] or (target == ANY and longest == 0)


@given(st.text(max_size=8), replicas(), st.randoms())
def test_every_tokenizer_that_knows_the_same_chooses_the_same(name: str, found: list[Replica], draw: object) -> None:
    shuffled = list(found)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    assert route(name, PROMPT, found) == route(name, PROMPT, shuffled)


@given(replicas(least=0).map(lambda found: found[:1]))
def test_one_replica_or_none_is_no_choice(found: list[Replica]) -> None:
    assert route("r", PROMPT, found) == ANY


def test_the_least_busy_takes_what_nobody_knows() -> None:
    idle, working = Replica("idle", 64, 1, set()), Replica("working", 64, 5, set())
    assert route("r", PROMPT, [working, idle]) == "idle"


def test_where_all_are_full_the_first_with_room_takes_what_nobody_knows() -> None:
    full = [Replica(name, 4, 4, set()) for name in "ab"]
    assert route("r", PROMPT, full) == ANY
    assert route("r", PROMPT, [full[0], Replica("c", 4, 4, {PROMPT[0]})]) == "c"


def test_equals_are_chosen_about_as_often() -> None:
    same = [Replica(name, 64, 3, set()) for name in "abcd"]
    targets = [route(f"r{i}", PROMPT, same) for i in range(400)]
    assert min(targets.count(name) for name in "abcd") > 50


@given(st.sets(st.integers(0, 20)))
def test_what_matches_is_the_longest_prefix_that_is_cached(cached: set[int]) -> None:
    length = matched(PROMPT, cached)
    assert length == 0 or PROMPT[length - 1] in cached
    assert not cached & set(PROMPT[length:])
