"""A server that speaks just enough of the NATS protocol to do at will what a real one does seldom."""

import asyncio
import json
from types import TracebackType
from typing import Self

INFO = {"server_id": "fake", "version": "2.15.1", "headers": True, "max_payload": 1 << 20, "proto": 1}


class FakeServer:
    """Takes any number of connections on loopback and notes what they say.

    Attributes:
        commands: what clients sent, one control line each, in order; payloads are left out.
        holding: whether pings stay without an answer.
    """

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.holding = False
        self.connections = 0
        self._unanswered = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    def say(self, text: str) -> None:
        """Sends protocol text to every client."""
        for writer in self._writers:
            writer.write(text.encode())

    def cut(self) -> None:
        """Ends every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def release(self) -> None:
        """Answers the pings that were held back, and all later ones at once."""
        self.holding = False
        self.say("PONG\r\n" * self._unanswered)
        self._unanswered = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
        try:
            while line := (await reader.readline()).decode().strip():
                self.commands.append(line)
                verb, *words = line.split(" ")
                if verb in {"PUB", "HPUB"}:
                    await reader.readexactly(int(words[-1]) + 2)
                elif verb == "PING" and self.holding:
                    self._unanswered += 1
                elif verb == "PING":
                    writer.write(b"PONG\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # how clients leave
        finally:
            self._writers.discard(writer)
            writer.close()
