"""Sizes of a device where the settings do not say."""

from pathlib import Path

import pytest

from pagewire.bench.shapes import write_folder
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.defaults import CPU, GPU, defaults_of, offline, slots_of
from pagewire.services.scheduler.policy.term_limits import limits_of
from pagewire.shared.messages.plan import Claimed
from pagewire.shared.settings.config import Settings


@pytest.mark.parametrize(
    ("device", "defaults"), [("cpu", CPU), ("sim:zero", CPU), ("cuda", GPU), ("sim:h100", GPU), ("sim:l40s", GPU)]
)
def test_defaults_belong_to_the_device(device: str, defaults: object) -> None:
    assert defaults_of(device) == defaults
    assert slots_of(Settings(device=device, max_num_seqs=7)) == 7


@pytest.mark.parametrize(
    ("device", "slots", "tokens"), [("cpu", 64, None), ("sim:h100", 1024, 16384), ("sim:l40s", 256, 16384)]
)
def test_a_program_that_waits_for_many_results_runs_more_at_once(device: str, slots: int, tokens: int | None) -> None:
    defaults = offline(Settings(device=device))
    assert (defaults.max_num_seqs, defaults.max_num_batched_tokens) == (slots, tokens)
    chosen = offline(Settings(device=device, max_num_seqs=3, max_num_batched_tokens=9))
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens) == (3, 9)


def test_slots_are_no_more_than_blocks_and_the_scheduler_learns_the_step(tmp_path: Path) -> None:
    write_folder("llama-3-8b", tmp_path)
    settings = Settings(device="sim:h100", max_model_len=1024)
    capacity = open_device(settings, tmp_path).capacity
    assert (capacity.max_num_seqs, capacity.step_tokens) == (256, 8192)
    few = Settings(device="sim:h100", max_model_len=1024, num_kv_blocks=90)
    assert open_device(few, tmp_path).capacity.max_num_seqs == 90
    claimed = Claimed(
        "e", accepted=True, num_blocks=9, block_size=16, max_num_seqs=2, max_model_len=64, step_tokens=8192
    )
    assert limits_of(claimed, settings, 1 << 20).budget == 8192
    assert limits_of(claimed, Settings(max_num_batched_tokens=32), 1 << 20).budget == 32
