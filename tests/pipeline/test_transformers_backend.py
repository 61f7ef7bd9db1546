"""With a family that `transformers` builds, the whole pipeline generates the tokens that `transformers` generates."""

import pytest

from tests.pipeline.test_exact import check_greedy

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("pool", [pytest.param("ample", marks=pytest.mark.full), "tiny"])
async def test_greedy_equals_transformers(pool: str) -> None:
    row = {"family": "gpt-oss", "window": 2, "budget": 16, "block_size": 8, "pool": pool, "prefix_cache": True}
    # Half of the blocks are for the layers with windows.
    await check_greedy(row, **({"num_kv_blocks": 26} if pool == "tiny" else {}))


async def test_greedy_of_two_ranks_equals_transformers() -> None:
    row = {"family": "granite", "window": 2, "budget": 16, "block_size": 8, "pool": "tiny", "prefix_cache": True}
    await check_greedy(row, tensor_parallel_size=2)
