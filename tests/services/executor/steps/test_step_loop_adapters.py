"""Sequences with adapters in the step loop: one whose adapter cannot be loaded ends alone."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from pagewire.services.executor.adapter_loader import AdapterLoader
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import targets_of
from pagewire.services.executor.devices.protocol import AdapterSlots, LoadedAdapter
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.adapters.files import AdapterFiles, read_files
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from pagewire.shared.models.model_folder import read_config
from tests.services.executor.fakes import PATIENCE, Run, add, plan, sampling
from tests.support.adapters import write_adapter
from tests.support.checkpoints import checkpoint

MISSING = "missing"
"""Hash of an adapter that the broker does not have."""


class Slots(AdapterSlots):
    """Keeps adapters as they are, and has each loaded before the sequence in its slot runs."""

    def __init__(self) -> None:
        self.targets = targets_of(build_model(read_config(checkpoint("llama"))))

    @override
    def pack(self, adapter: Adapter) -> Adapter:
        return adapter

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        """Does nothing."""

    @override
    def clear(self, slot: int) -> None:
        """Does nothing."""


class Adapted(Run):
    """A loop whose loader has every adapter but `MISSING`."""

    def __init__(self, folder: Path, *, depth: int, gated: bool = False) -> None:
        files = read_files(write_adapter(folder, checkpoint("llama")))
        self.asked = threading.Event()

        def fetch(digest: str) -> AdapterFiles:
            self.asked.set()
            if digest == MISSING:
                raise ConfigurationError("the broker does not have the adapter")
            return files

        self.loader = AdapterLoader(Slots(), fetch, max_rank=64, kept=4)
        super().__init__(depth=depth, gated=gated, adapters=self.loader)

    def outputs_until(self, sequence: int) -> list[StepOutput]:
        """The outputs up to the one with the end of a sequence."""
        outputs = []
        while True:
            output = self.output()
            outputs.append(output)
            ends = dict(zip(unpack(output.sequences), output.finishes, strict=True))
            if ends.get(sequence):
                return outputs


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Adapted]:
    started = Adapted(tmp_path, depth=request.param)
    yield started
    started.finish()
    started.loader.close()


def adapted(digest: str, added: AddSlot) -> AddSlot:
    return msgspec.structs.replace(added, adapter=digest)


def test_a_sequence_whose_adapter_is_missing_ends_alone(run: Adapted) -> None:
    long = add(0, 7, [1], range(8), picks=sampling(7, max_tokens=25))
    missing = adapted(MISSING, add(1, 8, [4, 5], [8]))
    there = adapted("there", add(2, 9, [6], range(10, 18), picks=sampling(9, max_tokens=25)))
    run.inbox.put(plan(1, long, missing, there, lease_until=100))
    ends: dict[int, Finish] = {}
    tokens = {7: 0, 8: 0, 9: 0}
    while len(ends) < 3:
        output = run.output()
        assert not output.failed
        rows = zip(unpack(output.sequences), unpack(output.tokens), output.finishes, strict=True)
        for sequence, token, finish in rows:
            tokens[sequence] += token != NO_TOKEN
            if finish:
                ends[sequence] = Finish(finish)
    assert ends == {7: Finish.LENGTH, 8: Finish.ADAPTER_LOST, 9: Finish.LENGTH}
    assert tokens == {7: 25, 8: 0, 9: 25}
    later = adapted("there", add(1, 10, [1], [8], picks=sampling(10, max_tokens=2)))
    run.inbox.put(plan(2, later, removed=[1], lease_until=100))
    assert 10 in unpack(run.outputs_until(10)[-1].sequences)
    assert not run.loop.broken


def test_a_lost_adapter_is_reported_though_nothing_else_runs(run: Adapted) -> None:
    run.inbox.put(plan(1, adapted(MISSING, add(0, 7, [1, 2], [0], computed=1)), lease_until=5))
    output = run.outputs_until(7)[-1]
    assert (unpack(output.sequences), unpack(output.starts), unpack(output.counts)) == ([7], [1], [0])
    assert (unpack(output.tokens), list(output.finishes)) == ([NO_TOKEN], [Finish.ADAPTER_LOST])


def test_the_end_of_a_sequence_answers_no_plan_before_the_steps_in_flight(tmp_path: Path) -> None:
    run = Adapted(tmp_path, depth=2, gated=True)
    run.inbox.put(plan(1, add(0, 7, [1], range(8), picks=sampling(7, max_tokens=25)), lease_until=100))
    run.entered()
    run.entered()
    run.inbox.put(plan(2, adapted(MISSING, add(1, 8, [4, 5], [8])), removed=[0], lease_until=100))
    run.device.allow()
    assert run.asked.wait(PATIENCE)
    run.device.allow(100)
    outputs = run.outputs_until(8)
    answered = [index for index, output in enumerate(outputs) if output.plan == 2] or [len(outputs)]
    assert max(index for index, output in enumerate(outputs) if 7 in unpack(output.sequences)) < answered[0]
    run.finish()
    run.loader.close()
