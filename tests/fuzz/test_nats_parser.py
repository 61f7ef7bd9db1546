"""The bytes of a NATS server, cut anywhere: parsed, or refused as malformed."""

import asyncio

from hypothesis import strategies as st
from nats.errors import ProtocolError

from pagewire.shared.bus.framing import header_block, read_headers
from pagewire.shared.bus.nats_parser import BulkParser
from tests.fuzz.fuzzing import fuzz, mutated

WIRE = [
    b"MSG a.b 1 3\r\nabc\r\nPING\r\n",
    b"MSG a.b 1 _INBOX.x 0\r\n\r\nMSG a 2 5\r\nhello\r\n",
    b"HMSG a 1 r 22 25\r\nNATS/1.0 503\r\nA: 1\r\n\r\nabc\r\n+OK\r\n",
    b"-ERR 'Permissions Violation'\r\nPONG\r\n",
    b'INFO {"max_payload": 5}\r\nPING\r\n',
]
TOKENS = [b"\r\n", b"MSG ", b"HMSG ", b"-1", b"99999999999", b" ", b"INFO [\r\n", b"INFO {\r\n", b"-ERR ''\r\n"]
KNOWN = [b'INFO {"a": 5}x\r\n', b'INFO \x80{"a": 5}\r\n', b"-ERR '\x80'\r\n", b"-ERR \r\n"]


class _Client:
    """Takes whatever the parser finds."""

    async def _process_msg(self, *_: object) -> None: ...
    async def _process_ping(self) -> None: ...
    async def _process_pong(self) -> None: ...
    async def _process_err(self, _: str) -> None: ...
    async def _process_info(self, _: object) -> None: ...


def test_any_bytes_are_parsed_or_refused() -> None:
    async def check(data: bytes, cuts: list[int]) -> None:
        def deliver(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
            read_headers(headers)

        parser = BulkParser(_Client(), deliver)
        try:
            begin = 0
            for end in [*sorted(cuts), len(data)]:
                await parser.parse(data[begin:end])
                begin = end
        except ProtocolError:
            pass

    with asyncio.Runner() as runner:
        pieces = st.tuples(mutated(WIRE, TOKENS), st.lists(st.integers(0, 60), max_size=4))
        fuzz(pieces, lambda given: runner.run(check(*given)), known=[(wire, []) for wire in KNOWN])


def test_headers_are_read_as_they_were_written() -> None:
    names = st.from_regex(r"[A-Za-z-]{1,8}", fullmatch=True)

    def check(headers: dict[str, str]) -> None:
        read = read_headers(header_block(headers)) if headers else {}
        assert list(read) == list(headers)

    fuzz(st.dictionaries(names, st.text(max_size=20), max_size=4), check, share=0.5)
    fuzz(mutated([header_block({"A": "1", "B-C": "x: y"})]), read_headers, share=0.5)
