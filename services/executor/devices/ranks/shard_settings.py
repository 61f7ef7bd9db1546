"""The part of a model that a rank has, by the settings."""

from pagewire.services.executor.models.shard import Shard
from pagewire.shared.settings.config import Settings


def shard_of(settings: Settings, rank: int) -> Shard:
    """Returns the part of the model that a rank has.

    >>> shard_of(Settings(tensor_parallel_size=2), rank=1)
    Shard(rank=1, size=2, by_expert=False)
    """
    return Shard(rank, settings.tensor_parallel_size, settings.enable_expert_parallel)
