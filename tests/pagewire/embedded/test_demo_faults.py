import asyncio
import sys

import pytest

from pagewire.embedded import demo_faults
from pagewire.embedded.supervisor import Program, Supervisor
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.fault import Fault, FaultKind
from pagewire.shared.process.linux_process import INSTANCE
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_the_named_instance_is_killed_and_no_other() -> None:
    ended: list[tuple[str, str]] = []
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    programs = [Program(name, command, lambda name=name: {INSTANCE: f"{name}1"}) for name in ("a", "b")]  # type: ignore[misc]
    supervisor = Supervisor(programs, on_ended=lambda name, instance: ended.append((name, instance)))
    bus = MemoryBus(MemoryBroker())
    await demo_faults.listen(bus, supervisor, allowed=True)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.pid("a") and supervisor.pid("b"))
    for message in (b"no message", encode(Fault("elsewhere", FaultKind.KILL)), encode(Fault("b1", FaultKind.KILL))):
        bus.publish(subjects.FAULTS, message)
    await until(lambda: ended)
    assert ended == [("b", "b1")]
    running.cancel()
    await asyncio.wait({running})
