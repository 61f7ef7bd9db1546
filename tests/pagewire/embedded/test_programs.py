"""The programs of a stack: names, replicas, and the GPU of each."""

import pytest

from pagewire import errors
from pagewire.embedded.programs import PIPELINE, program_names, programs_of, replicas_of
from pagewire.shared.settings.config import Settings


def gpus(environment: dict[str, str], replicas: int, service: str = "executor") -> list[dict[str, str]]:
    settings = Settings(model="m", device="cuda", data_parallel_size=replicas)
    return [program.gpu(environment) for program in programs_of(settings, [service])]


def test_each_replica_has_a_program_per_replicated_service() -> None:
    one, three = Settings(), Settings(data_parallel_size=3)
    assert [replicas_of(service, three) for service in PIPELINE] == [3, 3, 1, 1]
    assert {replicas_of(service, one) for service in PIPELINE} == {1}
    assert program_names("scheduler", 1) == ["scheduler"]
    assert program_names("scheduler", 3) == ["scheduler-0", "scheduler-1", "scheduler-2"]


def test_programs_of_several_models_have_the_model_in_their_names() -> None:
    alone = programs_of(Settings(model="m"), PIPELINE)
    beside = programs_of(Settings(model="m"), PIPELINE, several=True)
    assert [program.name for program in alone] == list(PIPELINE)
    assert [program.name for program in beside] == [f"{service}/m" for service in PIPELINE]
    assert {program.model for program in alone} == {"m"}


@pytest.mark.parametrize(
    ("visible", "own"), [("", ["0", "1"]), ("5,3", ["5", "3"]), ("GPU-a,GPU-b,2", ["GPU-a", "GPU-b"])]
)
def test_each_executor_replica_has_a_gpu_of_its_own(visible: str, own: list[str]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu["CUDA_VISIBLE_DEVICES"] for gpu in gpus(environment, 2)] == own
    assert gpus(environment, 2, "scheduler") == [{}, {}]
    assert gpus(environment, 1) == [{}]


def test_each_executor_replica_has_a_gpu_for_each_of_its_ranks() -> None:
    settings = Settings(model="m", device="cuda", data_parallel_size=2, tensor_parallel_size=2)
    for visible, own in ("", ["0,1", "2,3"]), ("7,5,3,1", ["7,5", "3,1"]):
        programs = programs_of(settings, ["executor"])
        assert [program.gpu({"CUDA_VISIBLE_DEVICES": visible})["CUDA_VISIBLE_DEVICES"] for program in programs] == own
    with pytest.raises(errors.ConfigurationError, match="executor-1"):
        [program.gpu({"CUDA_VISIBLE_DEVICES": "0,1,2"}) for program in programs_of(settings, ["executor"])]


def test_fewer_gpus_than_replicas_are_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="executor-1"):
        gpus({"CUDA_VISIBLE_DEVICES": "0"}, 2)
