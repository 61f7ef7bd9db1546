from dataclasses import asdict

import pytest

from tools.experiments.simulated_devices.first_tokens import CPUS, Load, measure, table


@pytest.mark.parametrize("lengths", ["200x20", "sharegpt"])
def test_a_small_run_has_all_figures(lengths: str) -> None:
    load = Load(lengths, clients=4, each=2)
    figures = measure(CPUS["fast"], load, seed=1)
    assert 0 < figures.ttft <= figures.ttft_p99
    assert figures.tpot > 0
    assert figures.tokens_per_s > 0
    (line,) = table([{"cpu": "fast", "load": asdict(load), "seeds": [asdict(figures)]}])[2:]
    assert f"| {lengths} | 4 x 2 |" in line


def test_beside_a_long_prompt_only_its_time_counts() -> None:
    figures = measure(CPUS["fast"], Load("10x900", clients=4, each=1, long_prompt=1000), seed=1)
    assert figures.ttft == figures.ttft_p99 > 300
