"""The suite notices deliberate mistakes."""

import pytest

from tests.kernels.triton.mutations import MAIN, MORE, Mutation, survives


@pytest.mark.parametrize("mutation", MAIN, ids=lambda mutation: mutation.name)
def test_main_mutants_are_caught(mutation: Mutation) -> None:
    assert not survives(mutation)


@pytest.mark.full
@pytest.mark.parametrize("mutation", MORE, ids=lambda mutation: mutation.name)
def test_more_mutants_are_caught(mutation: Mutation) -> None:
    assert not survives(mutation)


def test_a_mutation_must_find_its_place() -> None:
    with pytest.raises(ValueError, match="0 times"):
        survives(MAIN[0]._replace(before="no such text"))
