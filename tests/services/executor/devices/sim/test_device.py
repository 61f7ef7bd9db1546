"""The simulated device: its tokens, its clock, and how it is opened."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.bench.shapes import SHAPES, write_folder
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Capacity, Device, StepBatch
from pagewire.services.executor.devices.sim.device import DeviceClock, SimDevice, SimulatedStep, choices
from pagewire.services.executor.devices.sim.roofline import GPUS, Efficiency, Roofline, shape_of
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.sampling_parameters import Record, record
from pagewire.shared.settings.config import load

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=512, vocab_size=40)


def sampling(key: int = 1, **columns: float) -> Record:
    return record(temperature=1.0, key=key, **columns)


def batch(*rows: tuple[int, int, int, bool]) -> StepBatch:
    """Rows of (slot, start, width, samples)."""
    slots, starts, query_lens, samples = (np.array(column) for column in zip(*rows, strict=True))
    return StepBatch(slots, starts, query_lens, np.zeros(query_lens.sum(), np.int64), samples)


def token(device: SimDevice, slot: int, position: int) -> int:
    """The token that the device samples at `position`."""
    return int(device.launch(batch((slot, position - 1, 1, True))).wait()[0])


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 400))
def test_a_token_depends_on_key_and_position_alone(key: int, position: int) -> None:
    one, other = SimDevice(CAPACITY, None), SimDevice(CAPACITY, None)
    one.add(0, [0], sampling(key))
    other.add(5, [3, 4], sampling(key))
    other.add(1, [9], sampling(key ^ 1))
    mixed = other.launch(batch((1, 7, 1, True), (5, 0, position, True))).wait()
    assert token(one, 0, position) == mixed[1]


def test_tokens_cover_the_vocabulary_evenly() -> None:
    counts = np.bincount(choices(np.zeros(40_000, np.uint64), np.arange(40_000), 40), minlength=40)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_a_chunk_inside_a_prompt_samples_nothing() -> None:
    device = SimDevice(CAPACITY, None)
    device.add(0, [0], sampling())
    assert device.launch(batch((0, 0, 8, False))).wait().tolist() == [-1]


def test_the_end_of_text_is_never_sampled() -> None:
    device = SimDevice(CAPACITY, None, eos_ids=range(0, 40, 2))
    device.add(0, [0], sampling(), range(0, 40, 2))
    assert {token(device, 0, position) for position in range(1, 400)} == set(range(1, 40, 2))


def test_a_stop_id_is_sampled_from_the_minimum_length_on() -> None:
    device = SimDevice(CAPACITY, None)
    device.add(0, [0], sampling(min_length=100), range(39))
    assert {token(device, 0, position) for position in range(1, 100)} == {39}
    assert {token(device, 0, position) for position in range(100, 400)} > {0, 20, 38}


def test_later_changes_of_slots_have_no_effect_on_a_launched_step() -> None:
    device = SimDevice(CAPACITY, None)
    device.add(0, [0], sampling(key=1))
    expected = token(device, 0, 8)
    pending = device.launch(batch((0, 7, 1, True)))
    device.remove(0)
    device.add(0, [0], sampling(key=2))
    assert pending.wait().tolist() == [expected]


def test_a_reused_slot_forgets_its_last_sequence() -> None:
    device = SimDevice(CAPACITY, None)
    device.add(0, [0], sampling(key=1, min_length=100), range(39))
    device.remove(0)
    device.add(0, [0], sampling(key=2))
    fresh = SimDevice(CAPACITY, None)
    fresh.add(0, [0], sampling(key=2))
    assert [token(device, 0, p) for p in range(1, 50)] == [token(fresh, 0, p) for p in range(1, 50)]


def test_a_vocabulary_of_nothing_but_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="every token"):
        SimDevice(CAPACITY, None, eos_ids=range(40))


class Machine:
    """A clock that the test turns, and a sleep that wakes late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.oversleeps = 100.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self.oversleeps


def launch(clock: DeviceClock, seconds: float) -> SimulatedStep:
    return SimulatedStep(np.array([0]), clock, seconds, clock.launch(seconds))


def test_a_step_starts_behind_the_one_before_or_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), DeviceClock()
    launch(clock, 2.0).wait()
    assert machine.now == clock.end == 102.0
    machine.now += 1.0  # the host takes a second between two steps
    launch(clock, 2.0).wait()
    assert machine.now == clock.end == 105.0
    assert clock.busy == 4.0


def test_two_steps_in_flight_hide_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), DeviceClock()
    machine.oversleeps = 0.5
    running = launch(clock, 2.0)
    for _ in range(10):
        following = launch(clock, 2.0)
        running.wait()
        machine.now += 1.0
        running = following
    assert clock.busy == 20.0
    running.wait()
    assert clock.end == 122.0
    assert clock.busy == 22.0


def test_a_step_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, clock = Machine(monkeypatch), DeviceClock()
    step = launch(clock, 2.0)
    machine.now += 3.0
    step.wait()
    assert machine.now == 103.0


def test_a_step_takes_the_time_of_the_roofline() -> None:
    roofline = Roofline(shape_of(SHAPES["llama-3-8b"]), GPUS["h100"], 1, Efficiency(launch=0.02))
    device = SimDevice(CAPACITY, roofline)
    device.add(0, [0], sampling())
    expected = roofline.seconds(np.array([7]), np.array([1]), np.array([True]))
    began = time.monotonic()
    for _ in range(3):
        token(device, 0, 8)
    assert time.monotonic() - began >= 3 * expected
    assert device.busy == pytest.approx(3 * expected)
    device.close()


def test_a_device_without_step_time_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice(CAPACITY, None)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it slept"))
    token(device, 0, 8)
    assert device.busy == 0.0


def opened(folder: Path, **flags: Any) -> Device:
    return open_device(load({name.replace("_", "-"): value for name, value in flags.items()}, {}), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder("llama-3-8b", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["sim:a100-80", "sim:h100", "sim:h200", "sim:l40s", "sim:zero"])
def test_every_gpu_opens_without_weights(folder: Path, name: str) -> None:
    capacity = opened(folder, device=name).capacity
    assert (capacity.max_model_len, capacity.vocab_size) == (8192, 128256)
    assert capacity.num_blocks >= 8192 // 16


def test_the_pool_takes_the_memory_that_the_gpu_has_left(folder: Path) -> None:
    weights, block = 8_030_261_248 * 2, 131072 * 16
    room = int(((80 << 30) * 0.9 - (2 << 30)) - weights)
    assert opened(folder, device="sim:h100", max_num_seqs=4096).capacity.num_blocks == room // block
    assert opened(folder, device="sim:h100", num_kv_blocks=600).capacity.num_blocks == 600
    assert opened(folder, device="sim:h100", max_num_seqs=2).capacity.num_blocks == 2 * 512


def test_a_model_larger_than_the_gpu_needs_several(tmp_path: Path) -> None:
    write_folder("llama-3-70b", tmp_path)
    with pytest.raises(ConfigurationError, match="KV blocks"):
        opened(tmp_path, device="sim:h100")
    assert opened(tmp_path, device="sim:h100", tensor_parallel_size=4).capacity.num_blocks > 512


def test_the_models_own_end_is_read_from_the_folder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 3, "eos_token_id": [0, 2]}))
    device = opened(folder, device="sim:zero")
    device.add(0, [0], sampling())
    assert {int(device.launch(batch((0, p, 1, True))).wait()[0]) for p in range(100)} == {1}


def test_simulated_devices_compute_in_half_precision(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="bf16"):
        opened(folder, device="sim:h100", dtype="float32")


def test_an_unknown_gpu_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sim:h200.*sim:zero"):
        opened(folder, device="sim:b300")


def test_simulated_candidates_begin_with_the_token_and_halve_in_likelihood() -> None:
    device = SimDevice(CAPACITY, None)
    device.add(0, [0], sampling(key=3, num_candidates=4))
    device.add(1, [1], sampling(key=3))
    step = batch((0, 0, 1, True), (1, 0, 1, True))
    first, again = device.launch(step), device.launch(step)
    tokens, candidates = first.wait(), first.candidates
    assert candidates is not None
    assert again.candidates is not None
    assert candidates.rows.tolist() == [0]
    assert candidates.counts.tolist() == [4]
    assert candidates.ids[0] == tokens[0]
    assert len(set(candidates.ids.tolist())) == 4
    np.testing.assert_allclose(np.exp(candidates.logprobs), [0.5, 0.25, 0.125, 0.0625], rtol=1e-6)
    assert again.candidates.ids.tolist() == candidates.ids.tolist()
    device.copy([0], [1])
    device.add(0, [0], sampling(key=3))
    assert device.launch(step).candidates is None
