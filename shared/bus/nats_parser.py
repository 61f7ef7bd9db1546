"""The parser of nats-py, with a shorter way for messages, which are nearly all that a service reads."""

from collections.abc import Callable

from nats.protocol.parser import AWAITING_MSG_PAYLOAD, CRLF_SIZE, Parser

Deliver = Callable[[int, bytes, bytes, bytes, bytes], None]
"""Takes subscription id, subject, reply subject, payload and header block of a message; empty is what it lacks."""


class BulkParser(Parser):  # type: ignore[misc]
    """Takes whole messages off the front of what was read, at half the parent's cost. The parent does the rest:
    messages cut in two, other commands, and everything that is malformed."""

    def __init__(self, client: object, deliver: Deliver) -> None:
        """`client` is who the parent calls; `deliver` is called for each message that is taken here."""
        super().__init__(client)
        self._deliver = deliver

    async def parse(self, data: bytes = b"") -> None:
        """Delivers what is complete, in the order of the wire, and keeps what is not.

        Raises:
            ProtocolError: see the parent.
        """
        if self.state == AWAITING_MSG_PAYLOAD:
            lacking = self.needed + CRLF_SIZE - len(self.buf)
            await super().parse(data[:lacking])
            data = data[lacking:]
        elif self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        taken = self._take(data)
        if taken < len(data):
            await super().parse(data[taken:])

    def _take(self, data: bytes) -> int:
        """Delivers the messages at the front of `data`; where the rest begins."""
        begin = 0
        while data.startswith((b"MSG ", b"HMSG "), begin):
            end = data.find(b"\r\n", begin)
            if end < 0:
                break
            arguments = data[begin:end].split()
            headed = arguments[0] == b"HMSG"
            least = 4 + headed
            try:
                sid, size = int(arguments[2]), int(arguments[-1])
                header = int(arguments[-2]) if headed else 0
            except (IndexError, ValueError):
                break
            block = end + CRLF_SIZE
            payload, rest = block + header, block + size
            if len(arguments) < least or not 0 <= header <= size or rest + CRLF_SIZE > len(data):
                break
            reply = arguments[3] if len(arguments) > least else b""
            self._deliver(sid, arguments[1], reply, data[payload:rest], data[block:payload])
            begin = rest + CRLF_SIZE
        return begin
