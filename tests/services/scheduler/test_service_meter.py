"""The rate that is reported, from the requests of a policy."""

import time

import pytest

from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.service_meter import ServiceMeter
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.sampling_parameters import pack_record
from tests.services.scheduler.policy.cases import sequence

SLOTS, LENGTH, STEP = 8, 40, 0.1


def request(number: int) -> Request:
    work = WorkItem(
        request_id=f"r{number}",
        detokenizer="detok",
        prompts=(b"",),
        n=1,
        sampling=Sampling(LENGTH, pack_record(temperature=1.0)),
        priority=0,
        deadline=time.time() + 60,
    )
    started = Request(work, "queue", "ack", 1, 1, "", 0.0, sequences=[sequence(4)])
    started.queued = False
    return started


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_an_ended_request_is_counted_once(kept: int) -> None:
    """However many samples it is kept for because its detokenizer has not read its last token."""
    policy = Policy(1, TermLimits(num_blocks=64, block_size=16, max_num_seqs=SLOTS, budget=512, window=8))
    policy.running += [sequence(4) for _ in range(SLOTS)]
    meter, now = ServiceMeter(0.0), 0.0
    running: dict[int, Request] = {}
    ended: list[tuple[int, Request]] = []
    for step in range(1000):
        while len(running) < SLOTS:
            number = step * SLOTS + len(running)
            running[number] = request(number)
            meter.start(running[number], now)
        for number, each in list(running.items()):
            each.sequences[0].tokens.append(7)
            if each.num_generated == LENGTH - number % 7:
                meter.end(running.pop(number))
                each.ended_at = 1, step
                ended.append((step, each))
        now += STEP
        ended = [(at, each) for at, each in ended if step - at < kept]
        meter.sample(policy, [*running.values(), *(each for _, each in ended)], now)
    per_second = SLOTS / (STEP * (LENGTH - 3))
    assert meter.rate() == pytest.approx(per_second, rel=0.1)
