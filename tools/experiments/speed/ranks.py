"""Measures greedy decoding of two devices in turns: one rank with several threads, and several ranks with one each.

The model has random weights. A round is as many steps of each device as fit into a second.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pagewire.services.executor  # noqa: F401  # isort: skip  (before torch: it says how torch's threads wait)

import numpy as np

from pagewire.bench._common.output import add_output, markdown, spread, write
from pagewire.bench.cpu_step import SHAPES, VOCABULARY
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Device, StepBatch
from pagewire.shared.sampling_parameters import record
from pagewire.shared.settings.config import Settings

PROGRAM = "python -m tools.experiments ranks"
CONTEXT = 256
"""Positions of every row at most."""
PROMPT = 8
SECONDS = 1.0
"""Seconds of a device's turn."""


@dataclass
class Speed:
    """The tokens per second of both devices, turn by turn."""

    rows: int
    alone: list[float] = field(default_factory=list)
    ranked: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Speed of several ranks, as a multiple of that of one."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round."""
        return [ranked / alone for ranked, alone in zip(self.ranked, self.alone, strict=True)]


def main(arguments: list[str]) -> int:
    """Prints a table, and writes the raw results if that is asked for."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--model", default="s135", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    add_output(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5}
        (Path(folder) / "config.json").write_text(json.dumps({**config, **sizes, **SHAPES[options.model]}))
        alone, ranked = (
            exits.enter_context(closing(_open(Path(folder), max(options.rows), ranks))) for ranks in (1, options.ranks)
        )
        speeds = [_measure(alone, ranked, rows, options.rounds) for rows in options.rows]
    lines = (
        f"{one.rows} | {statistics.median(one.alone):.0f} | {statistics.median(one.ranked):.0f} | "
        f"{spread(one.ratio, one.ratios)}"
        for one in speeds
    )
    print(*markdown(f"{options.model}: rows | 1 rank, tokens/s | {options.ranks} ranks | ratio", lines), sep="\n")
    write(options.output, PROGRAM, arguments, speeds=[asdict(one) for one in speeds])
    return 0


def _open(folder: Path, rows: int, ranks: int) -> Device:
    blocks = rows * CONTEXT // 16
    settings = Settings(
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=CONTEXT,
        max_num_seqs=rows,
        num_kv_blocks=blocks,
        tensor_parallel_size=ranks,
    )
    device = open_device(settings, folder)
    for row in range(rows):
        device.add(row, range(row * CONTEXT // 16, (row + 1) * CONTEXT // 16), record())
    return device


def _measure(alone: Device, ranked: Device, rows: int, rounds: int) -> Speed:
    speed = Speed(rows)
    for device in (alone, ranked):
        _prefill(device, rows)
        _decode(device, rows, 0.2)
    for _ in range(rounds):
        speed.alone.append(_decode(alone, rows, SECONDS))
        speed.ranked.append(_decode(ranked, rows, SECONDS))
    return speed


def _prefill(device: Device, rows: int) -> None:
    ids = np.random.default_rng(0).integers(0, 1000, rows * PROMPT)
    zeros = np.zeros(rows, np.int64)
    device.launch(StepBatch(np.arange(rows), zeros, zeros + PROMPT, ids, np.ones(rows, np.bool_))).wait()


def _decode(device: Device, rows: int, seconds: float) -> float:
    """Returns tokens per second of steps of one token per row, at the positions behind the prompt over and over."""
    slots, ones, samples = np.arange(rows), np.ones(rows, np.int64), np.ones(rows, np.bool_)
    tokens, steps, began = np.ones(rows, np.int64), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        position = PROMPT + steps % (CONTEXT - PROMPT)
        tokens = device.launch(StepBatch(slots, ones * position, ones, tokens, samples)).wait()
        steps += 1
    return rows * steps / spent
