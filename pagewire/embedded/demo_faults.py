"""Causes the faults that somebody at the console asks for, where `--demo-faults` allows it."""

import signal

import structlog

from pagewire.embedded.supervisor import Supervisor
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.fault import Fault, FaultKind

SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.FREEZE: signal.SIGSTOP, FaultKind.DRAIN: signal.SIGTERM}
"""The signals that cause the faults."""

_fault = Decoder(Fault)
_log = structlog.get_logger()


async def listen(bus: Bus, supervisor: Supervisor, *, allowed: bool) -> None:
    """Sends signals to the processes of a supervisor from now on, as messages say, if that is `allowed`."""
    if not allowed:
        return

    def cause(message: Message) -> None:
        if (fault := _fault.try_decode(message.data)) is None:
            return
        for program, instance in supervisor.instances.items():
            if instance == fault.instance:
                _log.warning("fault", process=program, kind=fault.kind.value)
                supervisor.send_signal(program, SIGNALS[fault.kind])

    await bus.subscribe(subjects.FAULTS, cause)
