"""Sequences and tokens of a step where the settings do not say: they depend on the device and its memory."""

from typing import NamedTuple

import msgspec
import torch

from pagewire.services.executor.devices.sim.roofline import GPUS
from pagewire.shared.settings.config import STEP_TOKENS, Settings

LARGE = 70 * 10**9
"""Bytes of a GPU from which on many sequences fit beside a model."""


class Defaults(NamedTuple):
    """Sizes of a device where the settings do not say."""

    max_num_seqs: int
    step_tokens: int
    """Tokens of the first steps; a CPU adapts the number to the time of a step."""
    mixed_prompt_tokens: int
    """Prompt tokens of a step that decodes sequences too, unless many prompts wait; 0: no such limit."""


CPU = Defaults(64, STEP_TOKENS, 0)
GPU = Defaults(256, 8192, 512)
"""Steps of 512 tokens compute prompts at the full rate of an H200 (docs/gpu.md), and decodes wait for a step's end."""

MAX_DRAFTS = 64
"""Drafted tokens of a row, at most: as many as can be set."""
STEP_DRAFTS = 128
"""Drafted tokens of a step on a GPU, at most: the logits of each, of the whole vocabulary, are in memory at once."""
DRAFTED_ROWS = 64
"""Rows that sample beyond which nothing is drafted on a GPU: it waits while the host searches their texts."""
DRAFT_MODEL_TOKENS = 256
"""Positions that a step of a model that drafts computes, at most: the other model waits for it."""


def defaults_of(device: str) -> Defaults:
    """Returns the defaults of a device, by the setting of this name; sim:zero, which takes no time, is like a CPU."""
    return GPU if device == "cuda" or device.removeprefix("sim:") in GPUS else CPU


def slots_of(settings: Settings) -> int:
    """Returns the sequences that run at once, if there are blocks for so many."""
    return settings.max_num_seqs or defaults_of(settings.device).max_num_seqs


def offline(settings: Settings) -> Settings:
    """Returns the settings of a program that waits for the last of many results: more runs at once on a GPU."""
    if defaults_of(settings.device) == CPU:
        return msgspec.structs.replace(settings, max_num_seqs=slots_of(settings))
    return msgspec.structs.replace(
        settings,
        max_num_seqs=settings.max_num_seqs or (1024 if _memory(settings.device) >= LARGE else GPU.max_num_seqs),
        max_num_batched_tokens=settings.max_num_batched_tokens or 2 * GPU.step_tokens,
    )


def _memory(device: str) -> int:
    if device != "cuda":
        return GPUS[device.removeprefix("sim:")].memory
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
