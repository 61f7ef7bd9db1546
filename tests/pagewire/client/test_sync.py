import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire import Client
from pagewire.client.sync import LoopThread
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from tests.support.waiting import PATIENCE


def test_a_client_that_cannot_connect_leaves_no_thread_behind() -> None:
    before = threading.enumerate()
    with pytest.raises(ConfigurationError), Client("http://127.0.0.1:1", api_key="", tenant=""):
        pass
    assert threading.enumerate() == before


def test_a_call_in_another_thread_ends_with_the_client() -> None:
    thread, began = LoopThread(), threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    with ThreadPoolExecutor() as pool:
        call = pool.submit(thread.run, wait())
        assert began.wait(PATIENCE)
        thread.close()
        with pytest.raises(BusUnavailable, match="the client is closed"):
            call.result(PATIENCE)
    with pytest.raises(BusUnavailable, match="the client is closed"):
        thread.run(wait())
    thread.close()
