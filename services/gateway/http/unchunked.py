"""Responses of HTTP/1.0, which knows no chunks."""

from typing_extensions import override
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedCycle(RequestResponseCycle):
    """A response whose body ends with the connection, unless it has a length."""

    @override
    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self.chunked_encoding = False
        elif message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))  # uvicorn counts what comes next
        await super().send(message)
