"""The parser delivers what nats-py's own parser does, in the same order, however the wire is cut."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from pagewire.shared.bus.nats_parser import BulkParser

pytestmark = pytest.mark.anyio

Call = tuple[object, ...]
HEADERS = b"NATS/1.0\r\nA: 1\r\n\r\n"


@dataclass
class Listener:
    """Records the calls of a parser."""

    calls: list[Call] = field(default_factory=list)
    fast: int = 0
    """Messages that took the fast path."""

    def deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.fast += 1
        self.calls.append((sid, subject, reply, data, headers or None))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.calls.append((sid, bytes(subject), bytes(reply), data, headers))

    async def _process_ping(self) -> None:
        self.calls.append(("ping",))

    async def _process_pong(self) -> None:
        self.calls.append(("pong",))

    async def _process_err(self, text: str) -> None:
        self.calls.append(("error", text))

    async def _process_info(self, info: dict[str, object]) -> None:
        self.calls.append(("info", info))


def message(subject: str, sid: int, reply: str, data: bytes, headers: bytes = b"") -> bytes:
    """As a server writes it."""
    names = f"{subject} {sid} {reply} " if reply else f"{subject} {sid} "
    if headers:
        return f"HMSG {names}{len(headers)} {len(headers) + len(data)}\r\n".encode() + headers + data + b"\r\n"
    return f"MSG {names}{len(data)}\r\n".encode() + data + b"\r\n"


subjects = st.from_regex(r"[A-Za-z_$][A-Za-z0-9_.-]{0,20}", fullmatch=True)
awkward = [b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"PING\r\n", b"x" * 5000]
payloads = st.one_of(st.binary(max_size=60), st.sampled_from(awkward))
messages = st.builds(
    message,
    subjects,
    st.integers(1, 10_000),
    st.one_of(st.just(""), subjects),
    payloads,
    st.sampled_from([b"", b"", HEADERS]),
)
others = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Slow'\r\n", b'INFO {"a": 1}\r\n'])


async def parse(parser: Parser, pieces: list[bytes]) -> None:
    for piece in pieces:
        await parser.parse(piece)


def bulk() -> tuple[Listener, BulkParser]:
    listener = Listener()
    return listener, BulkParser(listener, listener.deliver)


@settings(deadline=None)
@given(commands=st.lists(st.one_of(messages, messages, others), max_size=12), data=st.data())
async def test_the_parser_delivers_the_same_as_nats_py(commands: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(commands)
    cuts = data.draw(st.lists(st.integers(0, len(wire)), max_size=8), label="cuts")
    pieces = [wire[begin:end] for begin, end in pairwise(sorted([0, *cuts, len(wire)]))]
    plain, (ours, parser) = Listener(), bulk()
    await parse(Parser(plain), pieces)
    await parse(parser, pieces)
    assert ours.calls == plain.calls


async def test_whole_messages_take_the_fast_path() -> None:
    listener, parser = bulk()
    headed = message("d", 4, "", b"w", HEADERS) + message("e", 5, "r", b"", HEADERS)
    bare = message("b", 2, "r", b"y") + message("c", 3, "", b"z")[:-4]
    await parse(parser, [message("a", 1, "", b"x") * 3 + headed + bare])
    assert listener.fast == 6
    assert listener.calls[3] == (4, b"d", b"", b"w", HEADERS)
    assert listener.calls[4] == (5, b"e", b"r", b"", HEADERS)
    assert listener.calls[5] == (2, b"b", b"r", b"y", None)


@pytest.mark.parametrize("size", [40, 100, 1000])
async def test_messages_after_a_cut_one_take_the_fast_path(size: int) -> None:
    listener, parser = bulk()
    wire = message("a", 1, "", b"0123456789") * 100
    await parse(parser, [wire[begin : begin + size] for begin in range(0, len(wire), size)])
    assert len(listener.calls) == 100
    assert listener.fast > 70


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a\r\n",
        b"MSG a b 3\r\n",
        b"MSG a 1 x\r\n",
        b"MSG a 1 -3\r\n",
        b"MSG \r\n",
        b"MSH a 1 3\r\n",
        b"HMSG a 1 3\r\nabc\r\n",
        b"HMSG a 1 x 3\r\nabc\r\n",
        b"HMSG a b 1 3\r\nabc\r\n",
        b"HMSG a 1 -1 3\r\nabc\r\n",
    ],
)
async def test_nats_pys_parser_refuses_malformed_lines(line: bytes) -> None:
    listener, parser = bulk()
    with pytest.raises(ProtocolError):
        await parse(parser, [message("a", 1, "", b"x") + line])
    assert len(listener.calls) == 1


async def test_a_reset_forgets_the_beginning_of_a_message() -> None:
    listener, parser = bulk()
    await parse(parser, [message("a", 1, "", b"0123456789")[:-5]])
    parser.reset()
    await parse(parser, [message("b", 2, "", b"x")])
    assert listener.calls == [(2, b"b", b"", b"x", None)]
