"""Measures the share of a core that each service of an idle stack takes.

With other checkouts, their stacks are idle at the same time: a busy machine then disturbs all alike.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import cpu_seconds, difference
from pagewire.shared.errors import Unavailable
from pagewire.shared.process.linux_process import children
from tools.experiments._common import checkouts

START_TIMEOUT = 180.0
"""Seconds within which a stack must be ready; the first start of a version compiles its kernels."""
SETTLING = 10.0
"""Seconds between the moment at which the stacks are ready and the measurement."""


def main(arguments: Sequence[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments idle", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="folders of other versions")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that is measured")
    parser.add_argument("--device", default="cpu")
    add_output(parser)
    options = parser.parse_args(arguments)
    folders = {"here": checkouts.HERE} | {folder.name: folder for folder in options.checkouts}
    shares = asyncio.run(measure(folders, options.device, options.seconds))
    print("\n".join(table(shares)))
    write(options.output, parser.prog, arguments, shares=shares)
    return 0


def table(shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a line per service, in Markdown, from the shares of a core by version and service."""
    names = sorted({name for services in shares.values() for name in services})
    lines = [" | ".join([name, *(f"{services.get(name, 0.0):.2%}" for services in shares.values())]) for name in names]
    total = [f"{sum(services.values()):.2%}" for services in shares.values()]
    return markdown(" | ".join(["service", *shares]), [*lines, " | ".join(["all", *total])])


async def measure(folders: Mapping[str, Path], device: str, seconds: float) -> dict[str, dict[str, float]]:
    """Returns the share of a core that each service of each version takes, all of them idle side by side."""
    async with AsyncExitStack() as exits:
        stacks = {name: await exits.enter_async_context(_stack(folder, device)) for name, folder in folders.items()}
        await asyncio.sleep(SETTLING)
        before = {name: _spent(stack) for name, stack in stacks.items()}
        await asyncio.sleep(seconds)
        after = {name: _spent(stack) for name, stack in stacks.items()}
    return {
        name: {service: spent / seconds for service, spent in difference(after[name], before[name]).items()}
        for name in stacks
    }


@asynccontextmanager
async def _stack(checkout: Path, device: str) -> AsyncIterator[int]:
    """Serves the bundled model with the version of a checkout; yields the id of the process that starts the others."""
    settings = checkouts.options(checkout, model="bundled", device=device, port=0, nats_port=0, log_level="error")
    process = await asyncio.create_subprocess_exec(
        *checkouts.command("pagewire", "serve"), stdout=asyncio.subprocess.PIPE, **settings
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = await process.stdout.readline()
        if not line.startswith(b"ready"):
            raise Unavailable(f"the stack of {checkout} has not started: see its log")
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


def _spent(supervisor: int) -> dict[str, float]:
    """Returns the CPU seconds so far of a stack's services, by name; spare processes and workers are `others`."""
    spent = cpu_seconds(supervisor)
    workers = sum(sum(cpu_seconds(child).values()) for child in children(supervisor))
    return spent | {"others": spent.pop("client", 0.0) + workers}
