"""Measures what ranks cost on one machine: tokens per second of a stack with one rank, and of one with several.

Both have the same cores and answer the same requests in turn; the first one answers them twice, so that the machine's
own spread is known. The model has random weights. With `--vllm` two of vLLM's CPU servers do the same instead
(`other_servers/vllm/setup_vllm_cpu.sh FOLDER` installs it).
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench.cpu_step import SHAPES
from tools.experiments._common.completions import model_rate
from tools.experiments._common.turns import Cell, measure
from tools.experiments.other_servers.vllm.inputs import write_model
from tools.experiments.other_servers.vllm.servers import PAGEWIRE, executable, serving

PROGRAM = "python -m tools.experiments ranks"
ONE, AGAIN, SEVERAL = "one rank", "the same again", "several ranks"


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--vllm", type=executable, help="vLLM's executable, as setup_vllm_cpu.sh prints it")
    parser.add_argument("--model", choices=SHAPES, default="s135", help="shape; weights are random")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="format of Pagewire's weights instead of bf16")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the second stack")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians")
    add_output(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(options.model, folder / "model")
        cells = _measure(folder, options)
    print("\n".join(table(cells)))
    write(options.output, PROGRAM, arguments, runs=[asdict(cell) for cell in cells])
    return 0


def table(cells: Sequence[Cell]) -> list[str]:
    """Returns a line per server and number of clients, in Markdown."""
    return markdown(
        f"model, server, clients | tokens/s with {ONE} | {AGAIN} | {SEVERAL}",
        (
            f"{cell.model}, {cell.server}, {cell.clients} | {statistics.median(cell.rates[ONE]):.1f} | "
            + " | ".join(map(cell.ratio, (AGAIN, SEVERAL)))
            for cell in cells
        ),
    )


def bound_cores(ranks: int, cores: Sequence[int]) -> str:
    """Returns the value of `VLLM_CPU_OMP_THREADS_BIND` that gives each rank as many cores.

    >>> bound_cores(2, [0, 1, 4, 5])
    '0,1|4,5'
    """
    size = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * size :][:size])) for rank in range(ranks))


def _measure(folder: Path, options: argparse.Namespace) -> list[Cell]:
    server, command = ("vllm", [str(options.vllm)]) if options.vllm else ("pagewire", PAGEWIRE)
    own = ["--quantization", options.quantization] if options.quantization else []
    model = " ".join([options.model, options.quantization or "bf16"])
    cells = [Cell(model, server, clients) for clients in options.clients]
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as opened:
        ports: Mapping[int, int] = {
            ranks: opened.enter_context(
                serving(
                    command,
                    folder / "model",
                    folder / f"{server}-{ranks}.log",
                    ["--tensor-parallel-size", str(ranks), *own],
                    {"VLLM_CPU_OMP_THREADS_BIND": bound_cores(ranks, cores)} if options.vllm else {},
                )
            )[0]
            for ranks in (1, options.ranks)
        }
        one, several = (partial(model_rate, ports[ranks], ["m"]) for ranks in (1, options.ranks))
        for answer in (one, several):  # nothing is measured cold
            answer(max(options.clients))
        measure(cells, {ONE: one, SEVERAL: several, AGAIN: one}, options.rounds)
    return cells
