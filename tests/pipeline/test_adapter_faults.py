"""Adapters change on two replicas while executors are killed: every answer is that of one content, and none is lost."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import ModelNotFound, Unavailable
from tests.pipeline.test_adapters import BASE, PREFIX, settings
from tests.support.adapters import write_adapter
from tests.support.checkpoints import checkpoint
from tests.support.processes import processes

pytestmark = [pytest.mark.full, pytest.mark.anyio]

CONTENTS = 4
CLIENTS = 6
SHORT = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def kill_executor() -> None:
    """Kills the first executor, by another of its ranks if it has several."""
    for executor in processes("executor")[:1]:
        with suppress(ProcessLookupError):
            os.kill((processes("executor", executor) or [executor])[0], signal.SIGKILL)


async def change_under_load(folder: Path, changes: int, kill_every: int, ranks: int) -> int:
    """Returns the number of answers that were checked beside the changes."""
    paths = [str(write_adapter(folder / str(seed), checkpoint(BASE), seed=seed)) for seed in range(CONTENTS)]
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": ranks, "max_loras": 3}
    stack_settings = settings({}, lora_dirs=str(folder), nats_port=0, **sizes)
    async with Stack(stack_settings, PIPELINE) as stack:
        url = (await stack.ready()).nats
        async with AsyncClient(url) as client, AsyncClient(url, user=stack.operator) as admin:

            async def text(model: str) -> str:
                return (await client.generate(PREFIX, SHORT, model=model, timeout=120)).choices[0].text

            for i, path in enumerate(paths):
                await admin.load_adapter(f"fixed-{i}", path)
            await admin.load_adapter("moving", paths[0])
            expected = [await text(f"fixed-{i}") for i in range(CONTENTS)]
            plain = await text(BASE)
            assert len({plain, *expected}) == CONTENTS + 1
            ended, answers = asyncio.Event(), 0

            async def ask(i: int) -> None:
                nonlocal answers
                while not ended.is_set():
                    try:
                        answer = await text(("moving", BASE, f"fixed-{i % CONTENTS}")[i % 3])
                    except (ModelNotFound, Unavailable):  # the name has none, or it has one again already
                        continue
                    assert answer in {0: expected, 1: [plain], 2: [expected[i % CONTENTS]]}[i % 3]
                    answers += 1

            async with asyncio.TaskGroup() as group:
                for i in range(CLIENTS):
                    group.create_task(ask(i))
                for turn in range(changes):
                    if turn % kill_every == kill_every - 1:
                        kill_executor()
                    if turn % 7 == 6:
                        await admin.unload_adapter("moving")
                        with pytest.raises(ModelNotFound):
                            await text("moving")
                    await admin.load_adapter("moving", paths[turn % CONTENTS], replace=True)
                    assert await text("moving") == expected[turn % CONTENTS]
                ended.set()
            return answers


@pytest.mark.parametrize(
    ("changes", "kill_every", "ranks"),
    [
        pytest.param(200, 10, 1, id="long"),
        pytest.param(30, 2, 1, id="no executor is left at times"),
        pytest.param(40, 8, 2, id="executors of two ranks"),
    ],
)
async def test_names_change_on_two_replicas_while_executors_are_killed(
    tmp_path: Path, changes: int, kill_every: int, ranks: int
) -> None:
    assert await change_under_load(tmp_path, changes, kill_every, ranks) > changes
