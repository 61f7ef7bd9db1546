from pagewire.services.scheduler.policy.pending_frees import PendingFrees
from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from tests.services.scheduler.policy.cases import sequence


def add(pending: PendingFrees, state: SequenceState, slot: int) -> Sequence:
    one = sequence(state=state, slot=slot)
    pending.add(one)
    return one


def test_slots_and_blocks_are_free_when_the_plan_that_took_them_is_answered() -> None:
    pending = PendingFrees()
    first = add(pending, SequenceState.ABORTED, 3)
    pending.mark_sent(1)
    second = add(pending, SequenceState.ABORTED, 5)
    assert (list(pending), pending.removed_slots) == ([second, first], [5])
    assert list(pending.pop_answered(0)) == []
    pending.mark_sent(2)
    assert list(pending.pop_answered(1)) == [first]
    assert list(pending) == [second]
    assert list(pending.pop_answered(7)) == [second]
    assert (list(pending), pending.removed_slots) == ([], [])


def test_a_sequence_that_no_plan_has_removed_stays_pending() -> None:
    pending = PendingFrees()
    add(pending, SequenceState.ABORTED, 3)
    assert list(pending.pop_answered(9)) == []


def test_room_is_being_made_from_the_preemption_to_its_answer() -> None:
    pending = PendingFrees()
    add(pending, SequenceState.ABORTED, 1)
    pending.mark_sent(1)
    blocked = [pending.blocks_admission]
    add(pending, SequenceState.PREEMPTED, 2)
    blocked.append(pending.blocks_admission)
    pending.mark_sent(2)
    blocked.append(pending.blocks_admission)
    list(pending.pop_answered(2))
    blocked.append(pending.blocks_admission)
    assert blocked == [False, True, True, False]
