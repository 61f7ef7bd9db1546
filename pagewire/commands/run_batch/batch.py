"""The requests of a file in OpenAI's batch format, and the answers to them."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
import structlog
from tqdm import tqdm

from pagewire.client.async_client import AsyncClient
from pagewire.commands import session
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.endpoint import FAULT_MESSAGE, Api
from pagewire.services.gateway.service import APIS
from pagewire.shared.errors import BusError, ConfigurationError, Internal, RequestError, invalid_field
from pagewire.shared.settings.config import Settings

RETRIES = 20
"""Number of attempts of a request that an overloaded stack refuses, or that finds no broker."""
BROKER_RETRY_MS = 1000
"""Milliseconds after which a request is sent again that has found no broker."""

_log = structlog.get_logger()


class Line(msgspec.Struct):
    """A request of the file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class Response(msgspec.Struct):
    """The answer to a request, as the route would give it over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Outcome(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: Response
    error: dict[str, Any] | None = None


def read(file: Path) -> list[Line]:
    """Returns the requests of a file.

    Raises:
        ConfigurationError: the file cannot be read, or a line is malformed or has the id of another one.
    """
    try:
        texts = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    lines: dict[str, Line] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"line {number} of {file} is no request of a batch: {error}") from error
        if line.custom_id in lines:
            raise ConfigurationError(f"line {number} of {file} has the custom_id {line.custom_id} of another line")
        lines[line.custom_id] = line
    return list(lines.values())


async def answer_all(lines: list[Line], output: TextIO, concurrency: int, settings: Settings) -> int:
    """Writes the answers to all requests, and shows a bar on a terminal. Returns 1 if a request has failed, else 0."""
    failed = 0
    async with session.connect(settings) as client:
        with tqdm(total=len(lines), unit="request", disable=not sys.stderr.isatty()) as bar:
            async for outcome in answers(client, lines, concurrency):
                failed += outcome.response.status_code != 200
                output.write(msgspec.json.encode(outcome).decode() + "\n")
                output.flush()
                bar.update()
    print(f"{len(lines) - failed} answered, {failed} failed")
    return 1 if failed else 0


async def answers(client: AsyncClient, lines: list[Line], concurrency: int) -> AsyncIterator[Outcome]:
    """Yields the answers to requests as they end. `concurrency` requests run at once."""
    waiting = iter(lines)
    running: set[asyncio.Task[Outcome]] = set()
    try:
        while True:
            while len(running) < concurrency and (line := next(waiting, None)) is not None:
                running.add(asyncio.create_task(_answer(client, line)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()


async def _answer(client: AsyncClient, line: Line) -> Outcome:
    request_id = secrets.token_hex(12)
    status, body = 200, b""
    for retries in reversed(range(RETRIES)):
        try:
            body = await _body(client, line, request_id)
            break
        except (BusError, RequestError) as error:
            if retries and (wait_ms := _wait_ms(error)) is not None:
                await asyncio.sleep(wait_ms / 1000)
                continue
            status, body = errors.body_of(error, line.url)
            break
        except Exception:  # noqa: BLE001  # a fault must not end the other requests
            _log.exception("request_failed", custom_id=line.custom_id)
            status, body = errors.body_of(Internal(FAULT_MESSAGE), line.url)
            break
    return Outcome(f"batch_req_{request_id}", line.custom_id, Response(status, request_id, msgspec.Raw(body)))


def _wait_ms(error: BusError | RequestError) -> int | None:
    """Returns the milliseconds after which a request is sent again; None: that is of no use."""
    if isinstance(error, BusError):
        return BROKER_RETRY_MS
    return error.retry_after_ms if error.retryable else None


async def _body(client: AsyncClient, line: Line, request_id: str) -> bytes:
    """Returns the answer of a request's route, encoded."""
    api: Api | None = APIS.get(line.url)
    if api is None:
        raise invalid_field("url", f"must be one of {', '.join(APIS)}, not {line.url}")
    call = await api.complete(client, api.read(bytes(line.body), UnknownFields()))
    if call.streamed:
        raise invalid_field("stream", "is not possible in a batch: set it to false")
    call.arguments["request_id"] = request_id
    stream = client.stream(**call.arguments)
    return msgspec.json.encode(await api.answer(client, call, stream, await stream.result()))
