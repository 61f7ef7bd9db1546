"""The real model that is served by default: 93 MB, fetched once per machine as users' own commands fetch it."""

from functools import cache
from pathlib import Path

from pagewire.shared.models.fetch import fetch
from pagewire.shared.models.named_models import DEFAULT


@cache
def default_model() -> Path:
    """Its file. A machine that cannot fetch it fails the test that asks for it."""
    return fetch(DEFAULT)
