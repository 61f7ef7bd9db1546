"""A gateway over the memory bus."""

import pytest

from tests.services.gateway.http_client import Gateway, start_gateway


@pytest.fixture
async def gateway() -> Gateway:
    return await start_gateway()
