"""Spans of the stages that a traced request passes at its scheduler, one behind the other and without a gap."""

import time
from collections.abc import Iterable, Mapping

from opentelemetry.util.types import AttributeValue

from pagewire.services.scheduler.policy.sequence import SequenceState
from pagewire.services.scheduler.request import Request, Stage
from pagewire.shared.telemetry import tracing


def accept(request: Request) -> None:
    """Begins the first stage of a request that has been delivered. Its time in the store was the one before."""
    if request.generation == 1:
        enter(request, Stage.ADMIT)
    else:  # the scheduler that had it before has recorded that time
        request.stage, request.stage_began = Stage.RECOVER, time.time()


def enter(request: Request, stage: Stage, **attributes: AttributeValue) -> None:
    """Ends the stage that a request is in, with a span that has these attributes, and begins another one."""
    now = time.time()
    if request.stage is not Stage.ENDED and tracing.records(request.trace):
        about: dict[str, AttributeValue] = {"request_id": request.work.request_id, **attributes}
        tracing.span(request.stage.value, request.trace, request.stage_began, now, about)
    request.stage, request.stage_began = stage, now


def note_preempted(by_sequence: Mapping[int, Request], preempted: Iterable[int]) -> None:
    """Ends the stage of the requests of these sequences, unless another sequence of the request runs."""
    for sequence_id in preempted:
        request = by_sequence.get(sequence_id)
        if request is not None and not any(s.state is SequenceState.RUNNING for s in request.sequences):
            enter(request, Stage.PREEMPTED, end="preempted", tokens=request.num_generated)


def note_term_end(requests: Iterable[Request], *, lost: bool) -> None:
    """Ends the stage of all requests that had a slot; `lost`: whether their executor was lost."""
    for request in requests:
        if request.stage in {Stage.RUN, Stage.PREEMPTED}:
            end = "executor_lost" if lost else "term_ended"
            enter(request, Stage.RECOVER, end=end, tokens=request.num_generated)
