"""Measures what adapters cost: tokens per second of rows without an adapter, all on one, and each on one of eight.

A stack without adapters and one that has eight answer the same requests in turn; the first one answers them twice, so
that the machine's own spread is known. Models and adapters have random weights: each adapter changes all products of a
layer. With `--vllm` two of vLLM's CPU servers do the same instead (`other_servers/vllm/setup_vllm_cpu.sh FOLDER`
installs it).
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench.cpu_step import SHAPES
from tools.experiments._common.completions import model_rate
from tools.experiments._common.turns import Cell, measure
from tools.experiments.other_servers.vllm.inputs import write_model
from tools.experiments.other_servers.vllm.servers import PAGEWIRE, executable, serving

ADAPTERS = 8
RANK = 16
WITHOUT, AGAIN, PLAIN, ONE, ALL = "without adapters", "the same again", "no row", "all rows one", f"{ADAPTERS} adapters"
CASES: Mapping[str, tuple[bool, Sequence[str]]] = {
    WITHOUT: (False, ["m"]),
    PLAIN: (True, ["m"]),
    ONE: (True, ["a0"]),
    ALL: (True, [f"a{number}" for number in range(ADAPTERS)]),
    AGAIN: (False, ["m"]),
}
"""By the rows that have an adapter: whether the stack has adapters, and the names for which rows ask in turn."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments adapters", description=__doc__)
    parser.add_argument("--vllm", type=executable, help="vLLM's executable, as setup_vllm_cpu.sh prints it")
    parser.add_argument("--model", choices=SHAPES, default="s135", help="shape; weights are random")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; figures are medians")
    add_output(parser)
    options = parser.parse_args(arguments)
    server, command = ("vllm", [str(options.vllm)]) if options.vllm else ("pagewire", PAGEWIRE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(options.model, folder / "model")
        write_adapters(folder)
        cells = _measure(server, command, folder, options)
    print("\n".join(table(cells)))
    write(options.output, parser.prog, arguments, model=options.model, runs=[asdict(cell) for cell in cells])
    return 0


def table(cells: Sequence[Cell]) -> list[str]:
    """Returns a line per server and number of clients, in Markdown."""
    head = f"model, server, clients | tokens/s {WITHOUT} | {AGAIN} | beside adapters, {PLAIN} has one | {ONE} | {ALL}"
    return markdown(
        head,
        (
            f"{cell.model}, {cell.server}, {cell.clients} | {statistics.median(cell.rates[WITHOUT]):.1f} | "
            + " | ".join(cell.ratio(case) for case in (AGAIN, PLAIN, ONE, ALL))
            for cell in cells
        ),
    )


def write_adapters(folder: Path) -> None:
    """Writes `ADAPTERS` PEFT folders a0, a1, ... of the model in `folder`/model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    products = {name: part for name, part in model.model.named_modules(prefix="model") if isinstance(part, nn.Linear)}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in products})
    for number in range(ADAPTERS):
        random = torch.Generator().manual_seed(number)
        tensors: dict[str, Tensor] = {}
        for name, part in products.items():
            for half, shape in (("A", (RANK, part.in_features)), ("B", (part.out_features, RANK))):
                factor = torch.randn(shape, generator=random) * shape[1] ** -0.5
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = factor.bfloat16()
        path = folder / f"a{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))


def _measure(server: str, command: Sequence[str], folder: Path, options: argparse.Namespace) -> list[Cell]:
    modules = [f"{path.name}={path}" for path in sorted(folder.glob("a?"))]
    limits = ["--max-loras", str(ADAPTERS), "--max-lora-rank", str(RANK)]
    adapters = ["--enable-lora", *limits, "--lora-modules", *modules]
    cells = [Cell(options.model, server, clients) for clients in options.clients]
    with ExitStack() as opened:
        ports = {
            has: opened.enter_context(serving(command, folder / "model", folder / f"{server}-{has}.log", arguments))[0]
            for has, arguments in ((False, []), (True, adapters))
        }
        cases = {name: partial(model_rate, ports[has], models) for name, (has, models) in CASES.items()}
        for answer in cases.values():  # nothing is measured cold
            answer(ADAPTERS)
        measure(cells, cases, options.rounds)
    return cells
