"""A worker that does not answer in time: one that hangs is given up, one that has no core is not."""

import asyncio
import os
import signal
import time

import pytest

from pagewire.services.tokenizer.chat import worker_process as module
from pagewire.services.tokenizer.chat.worker import Load
from pagewire.services.tokenizer.chat.worker_process import worker_process
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

LOAD = Load({"default": "{{ messages }}"}, {}, {})


async def test_a_worker_that_waits_for_a_core_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(module, "seconds_without_core", lambda process: time.monotonic() - began)
    async with worker_process(lambda: None) as worker:
        os.kill(worker.pid, signal.SIGSTOP)  # stands for a machine that gives it no core
        asking = asyncio.create_task(worker.ask(LOAD, 0.05))
        done, _ = await asyncio.wait({asking}, timeout=1.0)
        assert not done
        os.kill(worker.pid, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE):
            assert not (await asking).refusal


async def test_a_worker_that_waits_for_no_core_is_given_up() -> None:
    async with worker_process(lambda: None) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await worker.ask(LOAD, 0.05)
