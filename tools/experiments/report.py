"""Writes the tables of the documents, and the pictures, from the raw results in bench/results.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, and is replaced as a whole.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from pagewire.bench import chaos, cpu_step, drafts, pipeline, quality
from pagewire.bench._common.output import CHECKOUT, markdown
from tools.experiments._common import turns
from tools.experiments._common.experiment_files import EXPERIMENTS
from tools.experiments.correctness import drafted_schemas, structured
from tools.experiments.faults import long_queue, rolling_change, slow_prompt, store_changes
from tools.experiments.other_servers import chat, vllm_cpu
from tools.experiments.simulated_devices import (
    ablation,
    busy,
    fastgen,
    first_tokens,
    overload,
    replicas,
    sim,
    simulated_drafts,
)
from tools.experiments.simulated_devices.virtual_time.figures import mean
from tools.experiments.speed import adapters, features, idle, lease, ranks

RESULTS = CHECKOUT / "bench" / "results"
DOCS = CHECKOUT / "docs"
PAGES = (
    DOCS / "benchmarks.md",
    CHECKOUT / "README.md",
    DOCS / "faults.md",
    DOCS / "structured.md",
    DOCS / "cpu.md",
    DOCS / "gpu.md",
    DOCS / "speculation.md",
    DOCS / "parallel.md",
    DOCS / "adapters.md",
)
SMALL_MODEL, LARGE_MODEL = ablation.SYSTEMS
FULL = 256
"""Streams that use the pipeline fully."""
SHOWN_REPLICAS, SHOWN_CLIENTS = (1, 16), 400
SHOWN_CHANGES = ("lease window 1", "whole prompts first", "synchronous output", "no prefix cache")
Run = TypeVar("Run")
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Writes all pages and all pictures."""
    argparse.ArgumentParser(prog="python -m tools.experiments report", description=__doc__).parse_args(arguments)
    for file, text in contents().items():
        file.write_text(text)
        print(file)
    return 0


def contents() -> dict[Path, str]:
    """Returns what the pages and the pictures have to hold, by file."""
    pages = {page: filled(page.read_text(), TABLES) for page in PAGES}
    return pages | {RESULTS / f"{name}.svg": draw() for name, draw in PICTURES.items()}


def filled(page: str, tables: Mapping[str, Callable[[], list[str]]]) -> str:
    """Returns a page with all of its marked tables made anew."""
    return _MARKED.sub(lambda mark: mark[1] + "\n".join([*tables[mark[2]](), ""]) + mark[3], page)


def origin(file: Path) -> str:
    """Returns a sentence that names a raw file, and how, where and when it was made."""
    raw = json.loads(file.read_text())
    command: str = raw["command"]
    if (words := command.split())[:2] == ["pagewire", "bench"] and words[2] in EXPERIMENTS:  # as older files say
        command = command.replace("pagewire bench", "python -m tools.experiments", 1)
    return (
        f"[{file.name}](../bench/results/{file.name}): `{command}`, {raw['machine']}, "
        f"commit {raw['commit']}, {raw['date']}."
    )


def _runs(pattern: str) -> list[dict[str, Any]]:
    """Returns the runs of all raw files whose names match."""
    return [run for file in sorted(RESULTS.glob(pattern)) for run in json.loads(file.read_text())["runs"]]


def _sourced(pattern: str, table: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Returns a table with the origin of its raw files below it."""
    return lambda: [*table(), "", *(origin(file) for file in sorted(RESULTS.glob(pattern)))]


def _read(kind: Callable[..., Run], pattern: str) -> list[Run]:
    """Returns the runs of all raw files whose names match, as objects of a class."""
    return [kind(**run) for run in _runs(pattern)]


def _stacked(*tables: list[str]) -> list[str]:
    """Returns tables one below the other."""
    return [line for table in tables for line in (*table, "")][:-1]


def _ablation() -> ablation.Cells:
    return ablation.read(_runs("ablation.json"))


def _sim() -> list[str]:
    return sim.table(
        [
            run
            for run in _read(sim.Figures, "sim.json")
            if run.replicas in SHOWN_REPLICAS and run.clients == SHOWN_CLIENTS
        ]
    )


def _chaos() -> list[str]:
    """Returns a table per run."""
    return _stacked(*(chaos.table_of(run) for run in _runs("chaos*.json")))


def _features() -> list[str]:
    return features.table(json.loads((RESULTS / "features.json").read_text())["figures"])


def _structured() -> list[str]:
    files = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("structured*.json"))]
    outputs = [structured.Outputs(**one) for run in files for one in run["outputs"]]
    times = [structured.Times(**one) for run in files for one in run["times"]]
    return _stacked(structured.output_table(outputs), structured.time_table(times))


def _drafted_schemas() -> list[str]:
    """Returns a line per method; each file has the stack without drafts."""
    sides = {side.method: side for side in _read(drafted_schemas.Side, "drafted-schemas*.json")}
    (schemas,) = {json.loads(file.read_text())["schemas"] for file in RESULTS.glob("drafted-schemas*.json")}
    return drafted_schemas.table(sides.values(), schemas)


def _full_pipeline() -> list[pipeline.Figures]:
    return [run for run in _read(pipeline.Figures, "pipeline*.json") if run.streams == FULL]


def _gpu(part: str) -> list[str]:
    """Returns the table of a part of `bench gpu`."""
    from pagewire.bench._gpu import linear, load, profile, steps  # imports Triton, which is not on every machine

    kinds: Mapping[str, tuple[Callable[..., Any], Callable[[list[Any]], list[str]]]] = {
        "decode": (steps.DecodeRun, steps.decode_table),
        "prefill": (steps.PrefillRun, steps.prefill_table),
        "linear": (linear.LinearRun, linear.table),
        "profile": (_profiled, profile.table),
        "load": (load.LoadRun, load.table),
    }
    kind, table = kinds[part]
    files = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("gpu-*.json"))]
    return table([kind(**run) for file in files for run in file["parts"].get(part, [])])


def _h200() -> str:
    """Returns the headline of README.md: a decode step and a prompt."""
    parts = json.loads((RESULTS / "gpu-h200.json").read_text())["parts"]
    decode = next(run for run in parts["decode"] if (run["rows"], run["context"]) == (64, 4096))
    prompt = next(run for run in parts["prefill"] if run["tokens"] == 2048)
    return (
        f"64 sequences of 4096 tokens: a step in {median(decode['wall_ms']):.1f} ms, {decode['share']:.0%} of the copy"
        f" bandwidth; prompts: {prompt['tokens'] / median(prompt['device_ms']) * 1e3:,.0f} tokens/s,"
        f" {prompt['share']:.0%} of the matrix rate; busy {parts['profile'][0]['busy']:.1%}"
    )


def _profiled(gaps: list[dict[str, Any]], **fields: Any) -> Any:
    from pagewire.bench._gpu.profile import Gap, ProfileRun

    return ProfileRun(**fields, gaps=[Gap(**gap) for gap in gaps])


def _fastgen() -> fastgen.Cells:
    return fastgen.read(_runs("fastgen.json"))


def _vllm_zen4() -> list[str]:
    runs = _runs("vllm-zen4.json")
    return _stacked(*(vllm_cpu.comparison(runs, measure) for measure in ("output_throughput", "median_ttft_ms")))


def _figures() -> list[str]:
    """Returns the table of README.md: a line per claim."""
    nats, http = (
        [run.rate for run in _full_pipeline() if run.transport == transport] for transport in ("nats", "http")
    )
    chats = "; ".join(chat.headline(_read(chat.Round, f"chat-{machine}.json")) for machine in ("zen4", "xeon"))
    windows = {run.window: run for run in _read(lease.Run, "lease.json")}
    shares = {run.window: run for run in _read(busy.Run, "busy.json") if run.streams == 64}
    long_prompts = next(row for row in fastgen.ratios(_fastgen()) if row[0] == "2600 in, 60 out")
    one, *_, many = _read(replicas.Run, "replicas.json")
    base = [
        mean(runs)["waste"]
        for cell, runs in _ablation().items()
        if (cell.system, cell.load, cell.variant) == (SMALL_MODEL, "ShareGPT", ablation.BASE)
    ]
    rows = (
        "Tokens/s through all services, 256 streams, device without step time (simulated)"
        f" | {min(nats):,.0f} to {max(nats):,.0f} over NATS, {min(http):,.0f} over HTTP | pipeline",
        "Tokens/s against vLLM's CPU build, 1 / 32 / 128 clients (s135: 1 / 8 / 32 / 128), CPU with bf16 instructions"
        f" | {vllm_cpu.headline(_runs('vllm-zen4.json'))} times | vllm_cpu",
        f"The same, CPU without bf16 instructions | {vllm_cpu.headline(_runs('vllm-xeon.json'))} times | vllm_cpu",
        "Tokens/s against llama.cpp's server, chats with SmolLM2 from the same file, 1 / 8 / 32 clients; two machines"
        f" | {chats} times | chat",
        "Time in which the executor waits for a lease, bundled model, 16 streams"
        f" | {windows[8].waiting:.2%} with window 8, {windows[1].waiting:.2%} with window 1 | lease",
        "Busy share of one H100 in real time, 64 streams (simulated)"
        f" | {shares[8].busy:.1%} with window 8, {shares[1].busy:.1%} with window 1 | busy",
        "SplitFuse against whole prompts first, 2600 tokens in, 60 out, 16 clients (simulated) | P95 between tokens"
        f" {long_prompts[3]} times lower, effective throughput {long_prompts[4]} times | fastgen",
        "KV memory that is allocated and not written, ShareGPT lengths (simulated)"
        f" | {min(base):.1%} to {max(base):.1%} | ablation",
        f"{many.replicas} replicas against one, real broker (simulated)"
        f" | {many.rate / one.rate:.2f} times the tokens/s | replicas",
        f"Llama-3-8B in bf16 on one H200 | {_h200()} | gpu",
    )
    return markdown("claim | figure | measured by", map(_linked, rows))


def _linked(row: str) -> str:
    """Returns a row whose last cell, the name of a benchmark or an experiment, is a link to its file."""
    cells, _, name = row.rpartition(" | ")
    file = EXPERIMENTS.get(name, f"bench/{name}.py")
    return f"{cells} | [{name}]({file})"


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "figures": _figures,
    "vllm-zen4": _sourced("vllm-zen4.json", _vllm_zen4),
    "vllm-xeon": _sourced("vllm-xeon.json", lambda: vllm_cpu.comparison(_runs("vllm-xeon.json"), "output_throughput")),
    "vllm-moe": _sourced("vllm-moe.json", lambda: vllm_cpu.comparison(_runs("vllm-moe.json"), "output_throughput")),
    "families": _sourced("families.json", lambda: cpu_step.by_family(_read(cpu_step.Case, "families.json"))),
    "pipeline": _sourced("pipeline*.json", lambda: pipeline.table(_full_pipeline())),
    "chat-zen4": _sourced("chat-zen4.json", lambda: chat.table(_read(chat.Round, "chat-zen4.json"))),
    "chat-xeon": _sourced("chat-xeon.json", lambda: chat.table(_read(chat.Round, "chat-xeon.json"))),
    "packed-experts": _sourced("packed-experts.json", lambda: chat.table(_read(chat.Round, "packed-experts.json"))),
    "quality": _sourced("quality.json", lambda: quality.summary(_runs("quality.json"))),
    "features": _sourced("features.json", _features),
    "drafts": _sourced("drafts*.json", lambda: drafts.table(_read(drafts.Cell, "drafts*.json"))),
    "random-drafts": _sourced("random-drafts.json", lambda: drafts.table(_read(drafts.Cell, "random-drafts.json"))),
    "draft-model": _sourced("draft-model.json", lambda: drafts.table(_read(drafts.Cell, "draft-model.json"))),
    "other-drafts": _sourced("other-drafts.json", lambda: chat.table(_read(chat.Round, "other-drafts.json"))),
    "drafted-schemas": _sourced("drafted-schemas*.json", _drafted_schemas),
    "adapters": _sourced("adapters*.json", lambda: adapters.table(_read(turns.Cell, "adapters*.json"))),
    "ranks": _sourced("ranks*.json", lambda: ranks.table(_read(turns.Cell, "ranks*.json"))),
    "first-tokens": _sourced("first-tokens.json", lambda: first_tokens.table(_runs("first-tokens.json"))),
    "simulated-drafts": _sourced(
        "simulated-drafts.json",
        lambda: simulated_drafts.table(_read(simulated_drafts.Run, "simulated-drafts.json")),
    ),
    "lease": _sourced("lease.json", lambda: lease.table(_read(lease.Run, "lease.json"))),
    "busy": _sourced(
        "busy.json", lambda: busy.table([run for run in _read(busy.Run, "busy.json") if run.streams == 64])
    ),
    "fastgen": _sourced("fastgen.json", lambda: fastgen.summary(_fastgen())),
    "changes": _sourced("ablation.json", lambda: ablation.changes(_ablation(), SMALL_MODEL, SHOWN_CHANGES)),
    "overload": _sourced("overload.json", lambda: overload.summary(_read(overload.Figures, "overload.json")[0])),
    "replicas": _sourced("replicas.json", lambda: replicas.table(_read(replicas.Run, "replicas.json"))),
    "sim": _sourced("sim.json", _sim),
    "structured": _sourced("structured*.json", _structured),
    "chaos": _sourced("chaos*.json", _chaos),
    "rank-faults": _sourced("rank-faults.json", lambda: chaos.table_of(_runs("rank-faults.json")[0])),
    "long-queue": _sourced("long-queue*.json", lambda: long_queue.table(_runs("long-queue*.json"))),
    "store-changes": _sourced("store-changes.json", lambda: store_changes.table(_runs("store-changes.json"))),
    "rolling-change": _sourced("rolling-change*.json", lambda: rolling_change.table(_runs("rolling-change*.json"))),
    "idle": _sourced("idle.json", lambda: idle.table(json.loads((RESULTS / "idle.json").read_text())["shares"])),
    "slow-prompt": _sourced("slow-prompt.json", lambda: slow_prompt.table(_runs("slow-prompt.json"))),
    "gpu-decode": lambda: _gpu("decode"),
    "gpu-prefill": lambda: _gpu("prefill"),
    "gpu-linear": lambda: _gpu("linear"),
    "gpu-profile": _sourced("gpu-h200.json", lambda: _gpu("profile")),
    "gpu-load": _sourced("gpu-load-h200.json", lambda: _gpu("load")),
}
"""Tables by the names in their marks."""
PICTURES: Mapping[str, Callable[[], str]] = {
    "fastgen-2600-60": lambda: fastgen.curves(_fastgen(), 2600, 60),
    "ablation-llama-3-8b": lambda: ablation.window_chart(_ablation(), SMALL_MODEL),
    "ablation-llama-3-70b": lambda: ablation.window_chart(_ablation(), LARGE_MODEL),
    "sim": lambda: sim.curve(_read(sim.Figures, "sim.json")),
}
"""Pictures by the names of their files."""
