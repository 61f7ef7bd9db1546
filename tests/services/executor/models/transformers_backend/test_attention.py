"""Masks that models of transformers read themselves."""

from typing import Any

import pytest
import torch

from pagewire.services.executor.models.transformers_backend.attention import Mask
from pagewire.shared.errors import ConfigurationError


def test_all_positions_of_a_mask_are_the_mask() -> None:
    mask = Mask(lambda *_: True)
    assert mask[:, :, slice(-0, None), :] is mask


@pytest.mark.parametrize("parts", [0, slice(None), (slice(None), 0), (slice(1, None),), torch.ones(2)], ids=str)
def test_a_model_that_reads_its_mask_is_refused(parts: Any) -> None:
    with pytest.raises(ConfigurationError, match="reads the mask"):
        Mask(lambda *_: True)[parts]
