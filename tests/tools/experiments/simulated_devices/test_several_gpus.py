from tools.experiments.simulated_devices.several_gpus import Run, table


def test_the_share_of_collectives_is_of_the_busy_time() -> None:
    lines = table([Run(64, 10.0, busy_s=9.0, collectives_s=0.9, steps=300, rows=18000, sampled=17700)])
    assert "simulated" in lines[0]
    assert lines[2] == "| 64 | 90.00% | 10.0% | 60 | 30.0 | 1770 |"
