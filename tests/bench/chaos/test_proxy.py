import asyncio

import pytest

from pagewire.bench._chaos.proxy import HOST, Proxy
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


async def test_nothing_passes_while_it_is_cut_and_nothing_is_lost() -> None:
    server = await asyncio.start_server(echo, HOST, 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy, asyncio.timeout(PATIENCE):
        port = int(proxy.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        proxy.cut()
        writer.write(b"two")
        late = asyncio.create_task(reader.readexactly(3))
        new_reader, new_writer = await asyncio.open_connection(HOST, port)
        new_writer.write(b"new")
        new = asyncio.create_task(new_reader.readexactly(3))
        done, _ = await asyncio.wait({late, new}, timeout=0.2)
        assert not done

        proxy.mend()
        assert await late == b"two"
        assert await new == b"new"
        writer.close()
        new_writer.close()


async def test_a_connection_ends_when_its_other_side_has_ended() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    async with Proxy(server.sockets[0].getsockname()[1]) as proxy, asyncio.timeout(PATIENCE):
        async with server:
            reader, writer = await asyncio.open_connection(HOST, int(proxy.url.rpartition(":")[2]))
            assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection(HOST, int(proxy.url.rpartition(":")[2]))
        assert await reader.read() == b"", "there is nothing behind it any more"
        writer.close()
