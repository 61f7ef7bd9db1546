"""The step loop, two steps ahead, makes the GPU device emit what the CPU device does."""

import msgspec
import pytest
import torch

from pagewire.kernels.triton.sampling.sampling_columns import CHECKED_STOP_IDS
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import cpu_device, cuda_device
from tests.services.executor.devices.cuda.two_slots import TwoSlots
from tests.services.executor.fakes import sampling
from tests.support.checkpoints import VOCABULARY

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPTS = [[7, 300, 41, 5, 88], [12, 9], [7, 300, 41]]
MOST = 4
Texts = list[list[int]]


def client(stop_ids: Texts) -> TwoSlots:
    def picks(number: int) -> Sampling:
        chosen = sampling(number, max_tokens=MOST, stop_ids=stop_ids[number])
        return msgspec.structs.replace(chosen, record=record(temperature=number % 2).tobytes())

    return TwoSlots(PROMPTS, picks)


def test_tokens_and_ends_equal_the_cpus() -> None:
    free = client([[]] * len(PROMPTS))
    free.run(cpu_device("llama"))
    tokens = {token for text in free.texts for token in text}
    silent = [token for token in range(VOCABULARY) if token not in tokens][:CHECKED_STOP_IDS]
    # The first ends on the device. Of the third's stop ids, the device does not test the one that matters.
    stop_ids = [free.texts[0][1:2], [], [*silent, free.texts[2][1]]]
    expected, result = client(stop_ids), client(stop_ids)
    expected.run(cpu_device("llama"))
    device = cuda_device("llama", captured=False)
    assert device.depth == 2
    result.run(device)
    assert expected.finishes == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert (result.texts, result.finishes) == (expected.texts, expected.finishes)
