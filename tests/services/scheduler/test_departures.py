from pagewire.services.scheduler.departures import Departures
from pagewire.services.scheduler.sequence import Sequence, State
from tests.services.scheduler.cases import sequence


def leaving(departures: Departures, state: State, slot: int) -> Sequence:
    one = sequence(state=state, slot=slot)
    departures.add(one)
    return one


def test_they_are_back_when_the_plan_that_removed_them_is_answered() -> None:
    departures = Departures()
    first = leaving(departures, State.DROPPED, 3)
    departures.send(1)
    second = leaving(departures, State.DROPPED, 5)
    assert (list(departures), departures.slots) == ([second, first], [5])
    assert list(departures.answered(0)) == []
    departures.send(2)
    assert list(departures.answered(1)) == [first]
    assert list(departures) == [second]
    assert list(departures.answered(7)) == [second]
    assert (list(departures), departures.slots) == ([], [])


def test_what_no_plan_has_removed_is_not_answered() -> None:
    departures = Departures()
    leaving(departures, State.DROPPED, 3)
    assert list(departures.answered(9)) == []


def test_room_is_being_made_from_the_preemption_to_its_answer() -> None:
    departures = Departures()
    leaving(departures, State.DROPPED, 1)
    departures.send(1)
    seen = [departures.makes_room]
    leaving(departures, State.PREEMPTED, 2)
    seen.append(departures.makes_room)
    departures.send(2)
    seen.append(departures.makes_room)
    list(departures.answered(2))
    seen.append(departures.makes_room)
    assert seen == [False, True, True, False]
