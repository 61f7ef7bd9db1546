"""Devices of several GPUs, each a process under Triton's interpreter and joined by gloo."""

from typing import Any

import numpy as np

from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Device
from pagewire.shared.sampling_parameters import record
from pagewire.shared.settings.config import load
from tests.services.executor.devices.cuda.twins import BLOCK_SIZE, BLOCKS, SLOTS, Text
from tests.support.checkpoints import VOCABULARY, checkpoint

PROMPT = [7, 300, 41, 5, 88]


def opened(name: str = "llama", ranks: int = 2, blocks: int = BLOCKS, **flags: Any) -> Device:
    sizes = {"max-num-seqs": SLOTS, "block-size": BLOCK_SIZE, "num-kv-blocks": blocks, "max-num-batched-tokens": 32}
    options = {flag.replace("_", "-"): value for flag, value in flags.items()}
    settings = load(sizes | {"tensor-parallel-size": ranks, "device": "cuda", "dtype": "float32"} | options, {})
    return open_device(settings, checkpoint(name))


def texts(count: int, longest: int, most: int) -> list[Text]:
    """Every other one is sampled."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, longest - 3 * index).tolist() for index in range(count)]
    return [
        Text(ids, len(ids) + most, record(temperature=0.8, top_p=0.9, key=index) if index % 2 else record())
        for index, ids in enumerate(prompts)
    ]
