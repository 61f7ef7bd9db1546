import pytest

from shared.subjects import ANY, model_token, work_queue, work_queues


@pytest.mark.parametrize(
    ("priority", "name"),
    [(-(2**31), "urgent"), (-1, "urgent"), (0, "normal"), (1, "background"), (7, "background")],
)
def test_a_queue_per_class_of_priorities(priority: int, name: str) -> None:
    assert work_queue("m", priority, ANY) == f"m.{name}.any"


def test_the_queues_of_a_target_are_those_that_its_work_goes_to() -> None:
    assert work_queues("m", "abc") == [work_queue("m", priority, "abc") for priority in (-5, 0, 5)]


def test_a_model_is_one_token() -> None:
    assert model_token("org/model-1.5 b") == "org_model-1_5_b"
