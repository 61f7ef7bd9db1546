"""Ranks whose layers `transformers` computes answer as one rank does, or are refused before a weight is read."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PretrainedConfig

from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Device
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.settings.config import load
from tests.families.sweep import architecture_of, save
from tests.families.tiny import VOCABULARY, tiny_config
from tests.services.executor.devices.cpu.ranks.test_ranked_device import ENTRIES, add, run_steps, sampled, step

FAMILIES = {"granite": 2, "cohere": 3, "starcoder2": 4}
"""Scales of its own, a parallel block, and biases behind the sums, each with another number of ranks."""


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
    return tokens


@contextmanager
def opened(folder: Path, ranks: int, **flags: Any) -> Iterator[Device]:
    sizes = {"max-num-seqs": 4, "block-size": 8, "num-kv-blocks": 64, "dtype": "float32", "device": "cpu"}
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    with closing(open_device(load(sizes | {"tensor-parallel-size": ranks} | flags, {}), folder)) as device:
        yield device


def results_of(device: Device) -> tuple[list[list[int]], list[Any]]:
    """The tokens of each step, and its log-probabilities.

    Of two prompts one is cut. Then one text goes on greedily, the other one by a seed and in copied blocks.
    """
    first, second, more = text(1, 20), text(2, 14), text(3, 6)
    add(device, 0, sampled(num_logprobs=3))
    add(device, 1, sampled(temperature=0.8, top_p=0.9, key=11))
    steps = [step(device, (0, 0, first, True), (1, 0, second[:9], False))]
    for i, token in enumerate(more):
        row = (1, 14 + i, [token], True) if i else (1, 9, second[9:], True)
        steps.append(step(device, (0, 20 + i, [int(steps[-1].wait()[0])], True), row))
    add(device, 2)
    device.copy([ENTRIES, ENTRIES + 1], [2 * ENTRIES, 2 * ENTRIES + 1])
    steps.append(step(device, (2, 14, [7], True)))
    reports = [one.logprobs for one in steps if one.logprobs is not None]
    assert len(reports) == 1 + len(more)
    return [one.wait().tolist() for one in steps], [(report.ids.tolist(), report.values) for report in reports]


@pytest.mark.parametrize(("family", "ranks"), FAMILIES.items())
def test_ranks_answer_as_one_rank(family: str, ranks: int, tmp_path: Path) -> None:
    save(tiny_config(family), tmp_path)
    with opened(tmp_path, ranks=1) as device:
        expected, reported = results_of(device)
    with opened(tmp_path, ranks) as device:
        tokens, reports = results_of(device)
    assert tokens == expected
    for (ids, values), (same, close) in zip(reports, reported, strict=True):
        assert ids == same
        np.testing.assert_allclose(values, close, atol=1e-4)


def test_a_lost_rank_ends_a_step(tmp_path: Path) -> None:
    save(tiny_config("granite"), tmp_path)
    with opened(tmp_path, ranks=2) as device:
        add(device, 0)
        step(device, (0, 0, text(1, 9), True))
        os.kill(device._followers.processes[0], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(DeviceLost):
            run_steps(device)


def refusal(folder: Path, config: PretrainedConfig, **flags: Any) -> str:
    """The reason for which ranks are refused where there are no weights."""
    written = config.to_dict() | {"architectures": [architecture_of(config.model_type)]}
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigurationError) as raised, opened(folder, ranks=2, **flags):
        pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_family_without_a_plan_for_its_attention_is_refused_by_name(tmp_path: Path) -> None:
    assert "model_type gpt_oss cannot be cut for 2 ranks" in refusal(tmp_path, tiny_config("gpt_oss"))


def test_adapters_are_refused(tmp_path: Path) -> None:
    assert "without adapters: leave enable-lora out" in refusal(tmp_path, tiny_config("granite"), enable_lora="true")
