"""Simulated drafts: every text is generated as it is, and what repeats itself takes fewer steps."""

from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from tools.experiments.simulated_devices.simulated_drafts import Run, Text, replayed, table

ROOFLINE = Roofline(shape_of(SHAPES["llama-3-8b"]), GPUS["h100"])


def test_texts_that_repeat_themselves_are_generated_in_fewer_steps() -> None:
    texts = [Text(40, [*range(seed, seed + 40)] * 3) for seed in (5, 300)]
    run = replayed("code", texts, 2, ROOFLINE, host=0.0005)
    assert run.tokens == 4 * 80
    assert run.rows < run.tokens / 3
    assert run.accepted > 0.9 * run.drafted
    assert run.seconds_drafting < run.seconds_without / 2


def test_texts_without_a_repetition_take_no_longer_with_drafts() -> None:
    run = replayed("chat", [Text(40, [*range(200)])], 1, ROOFLINE, host=0.0005)
    assert (run.drafted, run.rows) == (0, run.tokens)
    assert run.seconds_drafting == run.seconds_without


def test_the_table_has_rates_and_accepted_shares() -> None:
    run = Run("code", 8, 1000, 10.0, 4.0, steps=50, rows=400, drafted=500, accepted=400, search_ms=0.1)
    assert table([run])[-1] == "| code, 8 | 100 | 250 | 2.50 | 10.0 | 0.80 | 2.50 |"
