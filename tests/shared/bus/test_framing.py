"""Headers are read as nats-py reads them, and as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from pagewire.shared.bus.framing import header_block, read_headers

pytestmark = pytest.mark.anyio

names = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,12}", fullmatch=True)
values = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=12) | st.just("a: b")


async def read_by_nats_py(block: bytes) -> dict[str, str]:
    headers = await Client()._process_headers(block)
    return {str(getattr(name, "value", name)): value for name, value in (headers or {}).items()}


@given(st.dictionaries(names, values, min_size=1, max_size=4))
async def test_headers_are_read_as_they_were_written(headers: dict[str, str]) -> None:
    block = header_block(headers)
    assert read_headers(block) == headers
    assert await read_by_nats_py(block) == headers


@pytest.mark.parametrize("status", ["503", "404 No Messages", "408 Request Timeout"])
async def test_a_status_is_a_header(status: str) -> None:
    block = f"NATS/1.0 {status}\r\n\r\n".encode()
    assert read_headers(block) == {"Status": status[:3]}
    assert (await read_by_nats_py(block))["Status"] == status[:3]


async def test_a_status_may_come_with_headers() -> None:
    block = b"NATS/1.0 409 Batch Completed\r\nNats-Pending-Messages: 3\r\nNats-Pending-Bytes: 0\r\n\r\n"
    expected = {"Status": "409", "Nats-Pending-Messages": "3", "Nats-Pending-Bytes": "0"}
    assert read_headers(block) == expected
    assert expected.items() <= (await read_by_nats_py(block)).items()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"NATS/1.0\r\nA:1\r\nB:\t 2 \r\n\r\n", {"A": "1", "B": "2"}),
        (b"NATS/1.0\r\nno colon\r\nA: 1\r\n\r\n", {"A": "1"}),
        (b"NATS/1.0\r\nA: \xff\r\n\r\n", {"A": "\ufffd"}),
        (b"NATS/1.0\r\n\r\n", {}),
    ],
)
async def test_headers_of_other_clients_are_read_as_nats_py_reads_them(block: bytes, expected: dict[str, str]) -> None:
    assert read_headers(block) == expected
    assert await read_by_nats_py(block) == expected
